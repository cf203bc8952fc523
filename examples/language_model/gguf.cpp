#include "gguf.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <concepts>
#include <cstring>
#include <limits>
#include <utility>

namespace language_model {

static_assert(std::endian::native == std::endian::little, "gguf: files are read as they lie");

namespace {

enum class value_type : std::uint32_t {
  u8,
  i8,
  u16,
  i16,
  u32,
  i32,
  f32,
  boolean,
  string,
  array,
  u64,
  i64,
  f64
};

constexpr std::uint64_t max_dimensions = 4;
constexpr std::uint64_t default_alignment = 32, max_alignment = std::uint64_t{1} << 30;

/// Takes values off the front of the file, each checked against what is left of it.
class cursor {
 public:
  cursor(const std::string& path, std::span<const std::byte> bytes) : path_(path), bytes_(bytes) {}

  [[nodiscard]] std::uint64_t offset() const noexcept { return offset_; }

  /// What is being read, for messages.
  void enter(std::string what) { what_ = std::move(what); }

  [[noreturn]] void fail(const std::string& problem) const {
    throw file_error(path_, "damaged or unsupported GGUF file: " + what_ + " at offset " +
                                std::to_string(offset_) + ": " + problem);
  }

  std::span<const std::byte> take(std::uint64_t count) {
    if (count > left())
      fail(std::to_string(count) + " bytes expected, the file has " + std::to_string(left()) +
           " more");
    const auto piece = bytes_.subspan(offset_, count);
    offset_ += count;
    return piece;
  }

  template <class T>
  T number() {
    T result;
    std::memcpy(&result, take(sizeof result).data(), sizeof result);
    return result;
  }

  std::string_view string() {
    const auto text = take(number<std::uint64_t>());
    return {reinterpret_cast<const char*>(text.data()), text.size()};
  }

  /// A count of things that take at least `smallest` bytes each: so many must still fit into the
  /// file.
  std::uint64_t count(std::uint64_t smallest) {
    const auto result = number<std::uint64_t>();
    if (result > left() / smallest)
      fail("a count of " + std::to_string(result) + ", more than the file can hold");
    return result;
  }

 private:
  [[nodiscard]] std::uint64_t left() const noexcept { return bytes_.size() - offset_; }

  const std::string& path_;
  std::span<const std::byte> bytes_;
  std::uint64_t offset_ = 0;
  std::string what_;
};

template <std::integral T>
std::int64_t signed_number(cursor& in) {
  const T n = in.number<T>();
  if (!std::in_range<std::int64_t>(n)) in.fail("an integer beyond 63 bits in an array");
  return static_cast<std::int64_t>(n);
}

bool boolean(cursor& in) {
  const auto byte = in.number<std::uint8_t>();
  if (byte > 1) in.fail("a boolean of value " + std::to_string(byte));
  return byte == 1;
}

template <class Element, class Read>
std::vector<Element> array_of(cursor& in, std::uint64_t smallest, Read&& read) {
  std::vector<Element> result(in.count(smallest));
  for (Element& element : result) element = read(in);
  return result;
}

gguf_file::value array(cursor& in) {
  using integers = std::int64_t;
  const auto type = in.number<std::uint32_t>();
  switch (static_cast<value_type>(type)) {
    case value_type::u8:
      return array_of<integers>(in, 1, signed_number<std::uint8_t>);
    case value_type::i8:
      return array_of<integers>(in, 1, signed_number<std::int8_t>);
    case value_type::u16:
      return array_of<integers>(in, 2, signed_number<std::uint16_t>);
    case value_type::i16:
      return array_of<integers>(in, 2, signed_number<std::int16_t>);
    case value_type::u32:
      return array_of<integers>(in, 4, signed_number<std::uint32_t>);
    case value_type::i32:
      return array_of<integers>(in, 4, signed_number<std::int32_t>);
    case value_type::u64:
      return array_of<integers>(in, 8, signed_number<std::uint64_t>);
    case value_type::i64:
      return array_of<integers>(in, 8, signed_number<std::int64_t>);
    case value_type::boolean:
      return array_of<integers>(in, 1, boolean);
    case value_type::f32:
      return array_of<double>(in, 4, [](cursor& c) { return double{c.number<float>()}; });
    case value_type::f64:
      return array_of<double>(in, 8, [](cursor& c) { return c.number<double>(); });
    case value_type::string:
      return array_of<std::string_view>(in, 8, [](cursor& c) { return c.string(); });
    case value_type::array:
      break;
  }
  in.fail("an array of values of type " + std::to_string(type) +
          " (supported: arrays of numbers, booleans and strings)");
}

gguf_file::value scalar_or_array(cursor& in) {
  const auto type = in.number<std::uint32_t>();
  switch (static_cast<value_type>(type)) {
    case value_type::u8:
      return std::uint64_t{in.number<std::uint8_t>()};
    case value_type::u16:
      return std::uint64_t{in.number<std::uint16_t>()};
    case value_type::u32:
      return std::uint64_t{in.number<std::uint32_t>()};
    case value_type::u64:
      return in.number<std::uint64_t>();
    case value_type::i8:
      return std::int64_t{in.number<std::int8_t>()};
    case value_type::i16:
      return std::int64_t{in.number<std::int16_t>()};
    case value_type::i32:
      return std::int64_t{in.number<std::int32_t>()};
    case value_type::i64:
      return in.number<std::int64_t>();
    case value_type::f32:
      return double{in.number<float>()};
    case value_type::f64:
      return in.number<double>();
    case value_type::boolean:
      return boolean(in);
    case value_type::string:
      return in.string();
    case value_type::array:
      return array(in);
  }
  in.fail("a value of type " + std::to_string(type) + " (supported: 0 to 12)");
}

/// Names of formats that exist but are not supported, so that the message names them as the user
/// knows them.
std::string name_of(std::uint32_t type) {
  constexpr std::array names{"F32",   "F16",   "Q4_0",    "Q4_1",   "",        "",      "Q5_0",
                             "Q5_1",  "Q8_0",  "Q8_1",    "Q2_K",   "Q3_K",    "Q4_K",  "Q5_K",
                             "Q6_K",  "Q8_K",  "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL",
                             "IQ3_S", "IQ2_S", "IQ4_XS",  "I8",     "I16",     "I32",   "I64",
                             "F64",   "IQ1_M", "BF16"};
  if (type < names.size() && *names[type] != '\0') return names[type];
  return "number " + std::to_string(type);
}

tensor_type supported_type(const cursor& in, std::uint32_t type) {
  switch (static_cast<tensor_type>(type)) {
    case tensor_type::f32:
    case tensor_type::f16:
    case tensor_type::bf16:
    case tensor_type::q8_0:
    case tensor_type::q4_0:
    case tensor_type::q4_1:
      return static_cast<tensor_type>(type);
  }
  in.fail("type " + name_of(type) + " (supported: F32, F16, BF16, Q8_0, Q4_0, Q4_1)");
}

/// A tensor's entry; `data` is set once the start of the data is known.
struct pending_tensor {
  tensor_info info;
  std::uint64_t offset;
  std::uint64_t bytes;
};

pending_tensor tensor_entry(cursor& in, std::uint64_t file_size) {
  tensor_info info{};
  info.name = in.string();
  in.enter("tensor " + in_quotes(info.name));
  const auto dimensions = in.number<std::uint32_t>();
  if (dimensions < 1 || dimensions > max_dimensions)
    in.fail(std::to_string(dimensions) + " dimensions (supported: 1 to 4)");
  info.shape.resize(dimensions);
  info.elements = 1;
  for (std::uint64_t& extent : info.shape) {
    extent = in.number<std::uint64_t>();
    if (extent == 0) in.fail("a dimension of length 0");
    if (extent > std::numeric_limits<std::uint64_t>::max() / info.elements)
      in.fail("more elements than 64 bits can count");
    info.elements *= extent;
  }
  info.type = supported_type(in, in.number<std::uint32_t>());
  const block_layout layout = layout_of(info.type);
  if (info.shape[0] % layout.elements != 0)
    in.fail("rows of " + std::to_string(info.shape[0]) + " elements, not a multiple of " +
            layout.name + "'s blocks of " + std::to_string(layout.elements));
  const std::uint64_t blocks = info.elements / layout.elements;
  if (blocks > file_size / layout.bytes)
    in.fail(std::to_string(info.elements) + " elements, more than the file can hold");
  const auto offset = in.number<std::uint64_t>();
  return {std::move(info), offset, blocks * layout.bytes};
}

/// Tensors have bytes of their own each.
void require_apart(cursor& in, const std::vector<pending_tensor>& tensors) {
  std::vector<const pending_tensor*> sorted;
  for (const pending_tensor& tensor : tensors) sorted.push_back(&tensor);
  std::sort(sorted.begin(), sorted.end(),
            [](const pending_tensor* a, const pending_tensor* b) { return a->offset < b->offset; });
  for (std::size_t i = 1; i < sorted.size(); ++i) {
    const pending_tensor &before = *sorted[i - 1], &tensor = *sorted[i];
    if (before.bytes <= tensor.offset - before.offset) continue;
    in.enter("tensor " + in_quotes(tensor.info.name));
    in.fail("its data begin within those of " + in_quotes(before.info.name));
  }
}

}  // namespace

gguf_file::gguf_file(const std::string& path) : file_(path) {
  const auto bytes = file_.bytes();
  constexpr std::string_view magic = "GGUF";
  if (bytes.size() < magic.size() || std::memcmp(bytes.data(), magic.data(), magic.size()) != 0)
    throw file_error(path, "not a GGUF file: it starts with " +
                               in_quotes({reinterpret_cast<const char*>(bytes.data()),
                                          std::min(bytes.size(), magic.size())}) +
                               ", expected 'GGUF'");

  cursor in(path, bytes);
  in.enter("header");
  in.take(magic.size());
  const auto version = in.number<std::uint32_t>();
  if (version != 2 && version != 3)
    in.fail("version " + std::to_string(version) + " (supported: 2 and 3, little-endian)");
  constexpr std::uint64_t smallest_tensor = 8 + 4 + 8 + 4 + 8, smallest_entry = 8 + 4 + 1;
  const std::uint64_t tensor_count = in.count(smallest_tensor);
  const std::uint64_t entry_count = in.count(smallest_entry);

  for (std::uint64_t i = 0; i < entry_count; ++i) {
    in.enter("metadata entry " + std::to_string(i));
    const std::string_view key = in.string();
    in.enter("metadata " + in_quotes(key));
    if (!metadata_.try_emplace(key, scalar_or_array(in)).second) in.fail("the key comes twice");
  }
  require_whole();
  const std::uint64_t alignment = find_integer("general.alignment").value_or(default_alignment);
  in.enter("metadata 'general.alignment'");
  if (!std::has_single_bit(alignment) || alignment > max_alignment)
    in.fail(std::to_string(alignment) + " (supported: powers of two up to 2^30)");

  std::vector<pending_tensor> pending;
  pending.reserve(tensor_count);
  for (std::uint64_t i = 0; i < tensor_count; ++i) {
    in.enter("tensor " + std::to_string(i));
    pending.push_back(tensor_entry(in, bytes.size()));
  }

  require_apart(in, pending);
  const std::uint64_t data_start = (in.offset() + alignment - 1) / alignment * alignment;
  const std::uint64_t data_size = bytes.size() - std::min<std::uint64_t>(data_start, bytes.size());
  for (pending_tensor& tensor : pending) {
    in.enter("tensor " + in_quotes(tensor.info.name));
    if (tensor.offset % alignment != 0)
      in.fail("its data's offset " + std::to_string(tensor.offset) + " is not a multiple of " +
              std::to_string(alignment));
    if (tensor.offset > data_size || tensor.bytes > data_size - tensor.offset)
      in.fail("its data (" + std::to_string(tensor.bytes) + " bytes from " +
              std::to_string(tensor.offset) + " on) ends after the file's " +
              std::to_string(data_size) + " bytes of data: truncated?");
    tensor.info.data = bytes.subspan(data_start + tensor.offset, tensor.bytes);
    const std::string_view name = tensor.info.name;
    if (!tensors_.try_emplace(name, std::move(tensor.info)).second) in.fail("the name comes twice");
  }
}

/// A file of many parts says so in each; the key stays in one that was joined again, as 0.
void gguf_file::require_whole() const {
  const std::uint64_t parts = find_integer("split.count").value_or(0);
  if (parts < 2) return;
  const auto index = find_integer("split.no");
  fail("part " + (index ? std::to_string(*index + 1) : "?") + " of " + std::to_string(parts) +
       " of a split GGUF file (supported: whole files; llama-gguf-split --merge joins the parts)");
}

void gguf_file::fail(const std::string& problem) const {
  throw file_error(path(), problem);
}

void gguf_file::fail_type(std::string_view key, const char* expected) const {
  fail("metadata " + in_quotes(key) + " is not " + expected);
}

const gguf_file::value* gguf_file::find(std::string_view key) const {
  const auto found = metadata_.find(key);
  return found == metadata_.end() ? nullptr : &found->second;
}

const gguf_file::value& gguf_file::get(std::string_view key) const {
  const value* found = find(key);
  if (found == nullptr) fail("metadata " + in_quotes(key) + " is missing");
  return *found;
}

std::optional<std::string_view> gguf_file::find_string(std::string_view key) const {
  const value* found = find(key);
  if (found == nullptr) return std::nullopt;
  if (const auto* text = std::get_if<std::string_view>(found)) return *text;
  fail_type(key, "a string");
}

std::optional<std::uint64_t> gguf_file::find_integer(std::string_view key) const {
  const value* found = find(key);
  if (found == nullptr) return std::nullopt;
  if (const auto* n = std::get_if<std::uint64_t>(found)) return *n;
  if (const auto* n = std::get_if<std::int64_t>(found); n != nullptr && *n >= 0)
    return static_cast<std::uint64_t>(*n);
  fail_type(key, "a non-negative integer");
}

std::optional<double> gguf_file::find_real(std::string_view key) const {
  const value* found = find(key);
  if (found == nullptr) return std::nullopt;
  if (const auto* x = std::get_if<double>(found)) return *x;
  fail_type(key, "a floating-point number");
}

const std::vector<std::int64_t>* gguf_file::find_integers(std::string_view key) const {
  const value* found = find(key);
  if (found == nullptr) return nullptr;
  if (const auto* numbers = std::get_if<std::vector<std::int64_t>>(found)) return numbers;
  fail_type(key, "an array of integers");
}

std::string_view gguf_file::string(std::string_view key) const {
  get(key);
  return *find_string(key);
}

std::uint64_t gguf_file::integer(std::string_view key) const {
  get(key);
  return *find_integer(key);
}

double gguf_file::real(std::string_view key) const {
  get(key);
  return *find_real(key);
}

const std::vector<std::string_view>& gguf_file::strings(std::string_view key) const {
  if (const auto* texts = std::get_if<std::vector<std::string_view>>(&get(key))) return *texts;
  fail_type(key, "an array of strings");
}

const tensor_info* gguf_file::find_tensor(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

namespace {

struct value_writer {
  std::string operator()(std::uint64_t n) const { return std::to_string(n); }
  std::string operator()(std::int64_t n) const { return std::to_string(n); }
  std::string operator()(bool b) const { return b ? "true" : "false"; }
  std::string operator()(std::string_view text) const { return in_quotes(text); }
  /// With as few digits as tell it apart, as a float if it is one.
  std::string operator()(double x) const {
    char text[32];
    char* end = std::to_chars(text, text + sizeof text, x).ptr;
    if (std::abs(x) <= double{std::numeric_limits<float>::max()})
      if (const auto narrow = static_cast<float>(x); double{narrow} == x)
        end = std::to_chars(text, text + sizeof text, narrow).ptr;
    return {text, end};
  }
  template <class T>
  std::string operator()(const std::vector<T>& values) const {
    return "an array of " + std::to_string(values.size());
  }
};

}  // namespace

std::string text_of(const gguf_file::value& value) {
  return std::visit(value_writer{}, value);
}

}  // namespace language_model
