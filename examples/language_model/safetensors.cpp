#include "safetensors.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <set>
#include <stdexcept>
#include <utility>

#include <nlohmann/json.hpp>

#include "gguf.hpp"

namespace language_model {

static_assert(std::endian::native == std::endian::little,
              "safetensors: files are read as they lie");

namespace {

using json = nlohmann::json;

constexpr std::uint64_t length_bytes = 8;
constexpr std::uint64_t longest_header = 100'000'000;  // as the format has it
constexpr int deepest_header = 16;  // more than it needs; each level takes memory
constexpr const char* metadata_key = "__metadata__";

/// Bits an element; nothing for a type that the format does not have.
std::optional<std::uint64_t> element_bits(std::string_view dtype) {
  constexpr std::pair<std::string_view, std::uint64_t> types[] = {
      {"F64", 64},        {"F32", 32},    {"F16", 16},    {"BF16", 16},       {"I64", 64},
      {"U64", 64},        {"I32", 32},    {"U32", 32},    {"I16", 16},        {"U16", 16},
      {"I8", 8},          {"U8", 8},      {"BOOL", 8},    {"C64", 64},        {"F8_E4M3", 8},
      {"F8_E5M2", 8},     {"F8_E8M0", 8}, {"F6_E2M3", 6}, {"F8_E4M3FNUZ", 8}, {"F6_E3M2", 6},
      {"F8_E5M2FNUZ", 8}, {"F4", 4}};
  for (const auto& [name, bits] : types)
    if (name == dtype) return bits;
  return std::nullopt;
}

/// Parses strictly: an object and then spaces, nothing else around them; and a key that comes twice
/// in one object is an error too.
json parse_header(std::string_view text) {
  text = text.substr(0, text.find_last_not_of(' ') + 1);
  if (!text.starts_with('{') || !text.ends_with('}'))
    throw std::invalid_argument(
        "its header is not a JSON object from its first byte on, then "
        "spaces alone");
  if (text.find('\0') != std::string_view::npos)
    throw std::invalid_argument("its header has a byte of value 0");
  std::vector<std::set<std::string>> keys;
  return json::parse(text, [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth > deepest_header) throw std::invalid_argument("its header is nested too deeply");
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second)
      throw std::invalid_argument("the key " + in_quotes(parsed.get<std::string>()) +
                                  " comes twice");
    return true;
  });
}

/// A non-negative integer that fits into 63 bits.
std::int64_t size_of(const json& number, const std::string& what) {
  if (!number.is_number_unsigned() ||
      number.get<std::uint64_t>() > std::uint64_t{std::numeric_limits<std::int64_t>::max()})
    throw std::invalid_argument(what + " is not a non-negative integer of 63 bits");
  return number.get<std::int64_t>();
}

safetensors_file::tensor tensor_of(const std::string& name, const json& entry,
                                   std::span<const std::byte> data) {
  const std::string what = "tensor " + in_quotes(name);
  const auto refuse = [&](const std::string& problem) {
    throw std::invalid_argument(what + ": " + problem);
  };
  if (!entry.is_object() || !entry.contains("dtype") || !entry["dtype"].is_string() ||
      !entry.contains("shape") || !entry["shape"].is_array() || !entry.contains("data_offsets") ||
      !entry["data_offsets"].is_array() || entry["data_offsets"].size() != 2)
    refuse("not a dtype, a shape and two data_offsets");

  safetensors_file::tensor result;
  result.dtype = entry["dtype"].get<std::string>();
  const auto bits = element_bits(result.dtype);
  if (!bits) refuse("its dtype is " + in_quotes(result.dtype) + ", which safetensors do not have");
  std::uint64_t size = *bits;
  for (const json& number : entry["shape"]) {
    const std::int64_t extent = size_of(number, what + ": an extent");
    if (extent != 0 &&
        size > std::numeric_limits<std::uint64_t>::max() / static_cast<std::uint64_t>(extent))
      refuse("its size does not fit into 64 bits");
    size *= static_cast<std::uint64_t>(extent);
    result.shape.push_back(extent);
  }
  if (size % 8 != 0) refuse("its elements do not fill whole bytes");
  size /= 8;
  const auto begin =
      static_cast<std::uint64_t>(size_of(entry["data_offsets"][0], what + ": an offset"));
  const auto end =
      static_cast<std::uint64_t>(size_of(entry["data_offsets"][1], what + ": an offset"));
  if (begin > end || end > data.size())
    refuse("its data lie from " + std::to_string(begin) + " to " + std::to_string(end) +
           ", the file has " + std::to_string(data.size()) + " bytes of data: truncated?");
  if (end - begin != size)
    refuse("its data have " + std::to_string(end - begin) + " bytes, its shape needs " +
           std::to_string(size));
  result.data = data.subspan(begin, end - begin);
  return result;
}

/// The tensors' data follow one another, from the first byte to the last.
void require_contiguous(const std::map<std::string, safetensors_file::tensor>& tensors,
                        std::span<const std::byte> data) {
  using entry = std::pair<const std::string, safetensors_file::tensor>;
  std::vector<const entry*> sorted;
  for (const entry& tensor : tensors) sorted.push_back(&tensor);
  const auto begin = [&](const entry* t) {
    return t->second.data.data() - data.data();
  };
  const auto end = [&](const entry* t) {
    return begin(t) + static_cast<std::ptrdiff_t>(t->second.data.size());
  };
  std::sort(sorted.begin(), sorted.end(), [&](const entry* a, const entry* b) {
    return std::pair(begin(a), end(a)) < std::pair(begin(b), end(b));
  });
  std::ptrdiff_t done = 0;
  for (const entry* t : sorted) {
    if (begin(t) != done)
      throw std::invalid_argument("tensor " + in_quotes(t->first) + ": its data begin at byte " +
                                  std::to_string(begin(t)) + ", those before it end at " +
                                  std::to_string(done));
    done = end(t);
  }
  if (done != static_cast<std::ptrdiff_t>(data.size()))
    throw std::invalid_argument("its tensors have " + std::to_string(done) +
                                " bytes of data, the file has " + std::to_string(data.size()));
}

template <class T>
std::string bytes_of(std::span<const T> elements) {
  return {reinterpret_cast<const char*>(elements.data()), elements.size_bytes()};
}

}  // namespace

safetensors_file::safetensors_file(const std::string& path) : file_(path) {
  const auto bytes = file_.bytes();
  try {
    std::uint64_t header_length = 0;
    if (bytes.size() < length_bytes) throw std::invalid_argument("shorter than its first 8 bytes");
    std::memcpy(&header_length, bytes.data(), length_bytes);
    if (header_length > bytes.size() - length_bytes)
      throw std::invalid_argument("its header has " + std::to_string(header_length) +
                                  " bytes, the file has " + std::to_string(bytes.size()) +
                                  ": truncated?");
    if (header_length > longest_header)
      throw std::invalid_argument("its header has " + std::to_string(header_length) +
                                  " bytes (supported: up to " + std::to_string(longest_header) +
                                  ")");
    const auto header_bytes = bytes.subspan(length_bytes, header_length);
    const auto data = bytes.subspan(length_bytes + header_length);
    const json header =
        parse_header({reinterpret_cast<const char*>(header_bytes.data()), header_bytes.size()});
    for (const auto& [name, entry] : header.items()) {
      if (name != metadata_key) {
        tensors_.emplace(name, tensor_of(name, entry, data));
        continue;
      }
      if (!entry.is_object()) throw std::invalid_argument("its metadata is not an object");
      for (const auto& [key, value] : entry.items()) {
        if (!value.is_string())
          throw std::invalid_argument("metadata " + in_quotes(key) + " is not a string");
        metadata_.emplace(key, value.get<std::string>());
      }
    }
    require_contiguous(tensors_, data);
  } catch (const json::exception&) {
    throw file_error(path,
                     "not a safetensors file, or a damaged one: its header is not valid JSON");
  } catch (const std::invalid_argument& problem) {
    throw file_error(path,
                     std::string("not a safetensors file, or a damaged one: ") + problem.what());
  }
}

std::vector<float> safetensors_file::floats(const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end())
    throw file_error(path(), "tensor " + in_quotes(name) + " is missing");
  const tensor& source = found->second;
  const auto type =
      source.dtype == "F32"   ? tensor_type::f32
      : source.dtype == "F16" ? tensor_type::f16
      : source.dtype == "BF16"
          ? tensor_type::bf16
          : throw file_error(path(), "tensor " + in_quotes(name) + " is of type " + source.dtype +
                                         " (supported: F32, F16, BF16)");
  std::vector<float> result(source.data.size() / layout_of(type).bytes);
  dequantize(type, source.data, result);
  return result;
}

void safetensors_writer::add(const std::string& name, std::vector<std::int64_t> shape,
                             std::span<const float> elements) {
  entries_[name] = {"F32", std::move(shape), bytes_of(elements)};
}

void safetensors_writer::add(const std::string& name, std::vector<std::int64_t> shape,
                             std::span<const focus::float16> elements) {
  entries_[name] = {"F16", std::move(shape), bytes_of(elements)};
}

void safetensors_writer::add(const std::string& name, std::vector<std::int64_t> shape,
                             std::span<const std::uint64_t> elements) {
  entries_[name] = {"U64", std::move(shape), bytes_of(elements)};
}

void safetensors_writer::write(const std::string& path) const {
  json header = json::object();
  if (!metadata_.empty()) header[metadata_key] = metadata_;
  std::string data;
  for (const auto& [name, tensor] : entries_) {
    header[name] = {{"dtype", tensor.dtype},
                    {"shape", tensor.shape},
                    {"data_offsets", {data.size(), data.size() + tensor.data.size()}}};
    data += tensor.data;
  }
  std::string text = header.dump();
  text.resize((text.size() + length_bytes - 1) / length_bytes * length_bytes,
              ' ');  // aligns the data
  const auto length = static_cast<std::uint64_t>(text.size());
  write_file(path, bytes_of(std::span(&length, 1)) + text + data);
}

}  // namespace language_model
