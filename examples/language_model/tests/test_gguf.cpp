#include "files.hpp"
#include "gguf.hpp"
#include "model.hpp"
#include "tiny_model.hpp"
#include "tokenizer.hpp"

namespace test_gguf {
using namespace language_model;

namespace {

/// Reads all that there is to read.
void read_everything(const std::string& path) {
  const gguf_file file(path);
  for (const auto& [name, tensor] : file.tensors()) {
    std::vector<float> out(tensor.elements);
    dequantize(tensor.type, tensor.data, out);
  }
}

std::vector<float> elements_of(std::uint32_t type, std::uint64_t count, const std::string& data) {
  gguf_writer writer;
  writer.tensor("t", {count}, type, data);
  const temporary_file file(writer.bytes());
  const gguf_file gguf(file.path());
  const tensor_info* tensor = gguf.find_tensor("t");
  REQUIRE(tensor != nullptr);
  REQUIRE(tensor->elements == count);
  std::vector<float> out(count);
  dequantize(tensor->type, tensor->data, out);
  return out;
}

constexpr std::uint16_t half_one = 0x3c00, half_two = 0x4000, half_minus_half = 0xb800;

/// One block of each format, with elements that can be worked out by hand.
struct block_case {
  std::uint32_t type;
  std::uint64_t elements;
  std::string data;
  std::vector<float> expected;
};

std::vector<block_case> block_cases() {
  std::string nibbles, signed_bytes;
  std::vector<float> q4_0(32), q4_1(32), q8_0(32);
  for (int j = 0; j < 16; ++j) {
    const int low = j, high = 15 - j;
    append(nibbles, static_cast<std::uint8_t>(low | high << 4));
    const auto at = static_cast<std::size_t>(j);
    q4_0[at] = 2.0f * static_cast<float>(low - 8);
    q4_0[at + 16] = 2.0f * static_cast<float>(high - 8);
    q4_1[at] = 2.0f * static_cast<float>(low) - 0.5f;
    q4_1[at + 16] = 2.0f * static_cast<float>(high) - 0.5f;
  }
  for (int j = 0; j < 32; ++j) {
    const auto quant = static_cast<std::int8_t>(j * 8 - 128);
    append(signed_bytes, quant);
    q8_0[static_cast<std::size_t>(j)] = -0.5f * static_cast<float>(quant);
  }
  return {{0, 2, bytes_of(1.25f, -3.0f), {1.25f, -3.0f}},
          {1, 3, bytes_of(half_one, half_two, half_minus_half), {1, 2, -0.5f}},
          {30, 2, bytes_of(std::uint16_t{0x3f80}, std::uint16_t{0xc040}), {1, -3}},
          {2, 32, bytes_of(half_two) + nibbles, q4_0},
          {3, 32, bytes_of(half_two, half_minus_half) + nibbles, q4_1},
          {8, 32, bytes_of(half_minus_half) + signed_bytes, q8_0}};
}

}  // namespace

TEST_CASE("gguf: every supported format is dequantised") {
  for (const block_case& c : block_cases()) {
    INFO("type " << c.type);
    CHECK(elements_of(c.type, c.elements, c.data) == c.expected);
    std::vector<float> twice = c.expected;
    twice.insert(twice.end(), c.expected.begin(), c.expected.end());
    CHECK(elements_of(c.type, 2 * c.elements, c.data + c.data) == twice);
  }
}

TEST_CASE("gguf: metadata of every type, in version 2 and 3") {
  for (const std::uint32_t version : {2u, 3u}) {
    gguf_writer writer;
    writer.version = version;
    writer.string("s", "text");
    writer.u32("u", 7);
    writer.i32("i", 8);
    writer.i32("negative", -8);
    writer.f32("f", 0.5f);
    writer.boolean("b", 1);
    writer.strings("names", {"a", "", "b c"});
    writer.i32s("numbers", {1, -2});
    writer.entry("doubles", 9, bytes_of(std::uint32_t{12}, std::uint64_t{1}, 2.5));
    const temporary_file file(writer.bytes());
    const gguf_file gguf(file.path());
    CHECK(gguf.string("s") == "text");
    CHECK(gguf.integer("u") == 7);
    CHECK(gguf.integer("i") == 8);
    CHECK(gguf.real("f") == 0.5);
    CHECK(gguf.strings("names") == std::vector<std::string_view>{"a", "", "b c"});
    REQUIRE(gguf.find_integers("numbers") != nullptr);
    CHECK(*gguf.find_integers("numbers") == std::vector<std::int64_t>{1, -2});
    CHECK(gguf.find_string("none") == std::nullopt);
    CHECK(gguf.find_integers("none") == nullptr);
    require_file_error([&](const std::string&) { (void)gguf.integer("none"); }, file.path(),
                       {"'none'", "missing"});
    require_file_error([&](const std::string&) { (void)gguf.integer("s"); }, file.path(),
                       {"'s'", "integer"});
    require_file_error([&](const std::string&) { (void)gguf.integer("negative"); }, file.path(),
                       {"'negative'"});
    require_file_error([&](const std::string&) { (void)gguf.find_string("u"); }, file.path(),
                       {"'u'", "a string"});
  }
}

TEST_CASE("gguf: the alignment that the file gives is kept") {
  gguf_writer writer;
  writer.alignment = 64;
  writer.u32("general.alignment", 64);
  writer.tensor("a", {1}, {1.0f});
  writer.tensor("b", {1}, {2.0f});
  const temporary_file file(writer.bytes());
  const gguf_file gguf(file.path());
  float b = 0;
  dequantize(tensor_type::f32, gguf.find_tensor("b")->data, {&b, 1});
  CHECK(b == 2);
}

TEST_CASE("gguf: files cut or damaged anywhere give one clear line") {
  for (const block_case& c : block_cases()) {
    gguf_writer writer;
    writer.string("key", "value");
    writer.strings("words", {"x", "yz"});
    writer.i32s("numbers", {3});
    writer.tensor("first", {c.elements, 2}, c.type, c.data + c.data);
    writer.tensor("second", {c.elements}, c.type, c.data);
    damage_everywhere(writer.bytes(), read_everything);
  }
}

TEST_CASE("gguf: a whole model cut or damaged gives one clear line") {
  const std::string content = tiny_model_file({.layers = 1,
                                               .d_model = 4,
                                               .heads = 1,
                                               .kv_heads = 1,
                                               .head_dim = 4,
                                               .feed_forward = 2,
                                               .vocabulary = 259});
  const auto read = [](const std::string& path) {
    const gguf_file file(path);
    const tokenizer tokens(file);
    const model weights(file);
  };
  const temporary_file file(content);
  read(file.path());
  // The vocabulary makes up most of the file; the header, the first tokens and the tensors' entries
  // are what is damaged.
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    std::string damaged = content;
    const std::size_t at = random() % content.size();
    damaged[at] = static_cast<char>(random());
    file.write(i % 2 == 0 ? damaged : damaged.substr(0, at));
    try {
      read(file.path());
    } catch (const file_error& error) {
      REQUIRE(std::string(error.what()).starts_with(file.path() + ": "));
    }
  }
}

TEST_CASE("gguf: unsupported and nonsensical files are named as such") {
  const auto refused = [](const std::string& content, const std::vector<std::string>& expected) {
    const temporary_file file(content);
    require_file_error(read_everything, file.path(), expected);
  };
  refused("", {"not a GGUF file", "expected 'GGUF'"});
  refused("PK\3\4 a zip file", {"not a GGUF file", "'PK\\x03\\x04'"});
  const auto with = [](auto&& change) {
    gguf_writer writer;
    change(writer);
    return writer.bytes();
  };
  refused(with([](gguf_writer& w) { w.version = 1; }), {"version 1", "supported: 2 and 3"});
  refused("GGUF" + bytes_of(3u, ~std::uint64_t{0}, std::uint64_t{0}),
          {"count", "more than the file can hold"});
  refused("GGUF" + bytes_of(3u, std::uint64_t{0}, std::uint64_t{1} << 60),
          {"count", "more than the file can hold"});
  refused(with([](gguf_writer& w) { w.entry("k", 13, ""); }), {"'k'", "type 13"});
  refused(with([](gguf_writer& w) { w.boolean("k", 2); }), {"'k'", "boolean"});
  refused(with([](gguf_writer& w) { w.entry("k", 9, bytes_of(9u, std::uint64_t{0})); }),
          {"'k'", "array"});
  refused(with([](gguf_writer& w) { w.entry("k", 9, bytes_of(4u, std::uint64_t{1} << 62)); }),
          {"'k'", "count"});
  refused(with([](gguf_writer& w) { w.entry("k", 8, bytes_of(~std::uint64_t{0})); }),
          {"'k'", "bytes expected"});
  refused(with([](gguf_writer& w) {
            w.u32("k", 1);
            w.u32("k", 1);
          }),
          {"'k'", "twice"});
  refused(with([](gguf_writer& w) { w.u32("general.alignment", 24); }),
          {"general.alignment", "24"});
  refused(with([](gguf_writer& w) { w.u32("general.alignment", 0); }), {"general.alignment", "0"});
  const std::string two_floats = bytes_of(1.0f, 2.0f);
  refused(with([&](gguf_writer& w) { w.tensor("t", {2}, 12, two_floats); }),
          {"'t'", "Q4_K", "supported: F32"});
  refused(with([&](gguf_writer& w) { w.tensor("t", {2}, 999, two_floats); }),
          {"'t'", "number 999"});
  refused(with([&](gguf_writer& w) {
            w.tensor("t", {2}, 0, two_floats);
            w.tensor("t", {2}, 0, two_floats);
          }),
          {"'t'", "twice"});
  refused(with([&](gguf_writer& w) { w.tensor("t", {}, 0, two_floats); }), {"'t'", "0 dimensions"});
  refused(with([&](gguf_writer& w) {
            w.tensor("t", {1, 1, 1, 1, 2}, 0, two_floats);
          }),
          {"'t'", "5 dimensions"});
  refused(with([&](gguf_writer& w) { w.tensor("t", {2, 0}, 0, two_floats); }), {"'t'", "length 0"});
  refused(with([&](gguf_writer& w) { w.tensor("t", {3}, 0, two_floats); }), {"'t'", "truncated?"});
  refused(with([&](gguf_writer& w) { w.tensor("t", {33}, 8, std::string(68, '\0')); }),
          {"'t'", "multiple of Q8_0"});
  const std::uint64_t large = std::uint64_t{1} << 62;
  refused(with([&](gguf_writer& w) {
            w.tensor("t", {large, 8}, 0, two_floats);
          }),
          {"'t'", "64 bits"});
  refused(with([&](gguf_writer& w) { w.tensor("t", {large}, 0, two_floats); }),
          {"'t'", "more than the file can hold"});
}

TEST_CASE("gguf: a part of a split file says which part it is") {
  const auto part = [](auto&& add_count) {
    gguf_writer writer;
    add_count(writer);
    writer.tensor("t", {1}, {1.0f});
    return writer.bytes();
  };
  const auto u16 = [](gguf_writer& w, const char* key, unsigned n) {
    w.entry(key, 2, bytes_of(static_cast<std::uint16_t>(n)));
  };
  for (const unsigned no : {0u, 1u}) {
    const temporary_file file(part([&](gguf_writer& w) {
      u16(w, "split.no", no);
      u16(w, "split.count", 2);
      w.i32("split.tensors.count", 2);
    }));
    require_file_error(read_everything, file.path(),
                       {"part " + std::to_string(no + 1) + " of 2 of a split GGUF file"});
  }
  // 0 is what stays when the parts have been joined again.
  for (const unsigned count : {0u, 1u}) {
    const temporary_file file(part([&](gguf_writer& w) { u16(w, "split.count", count); }));
    REQUIRE_NOTHROW(read_everything(file.path()));
  }
}

TEST_CASE("gguf: tensors that share bytes are refused, in any order") {
  // Two tensors of 16 floats, the first at 0; the second's offset is the file's last entry.
  gguf_writer writer;
  const std::vector<float> elements(16, 1.0f);
  writer.tensor("a", {16}, elements);
  writer.tensor("b", {16}, elements);
  const std::string content = writer.bytes();
  const std::size_t offset_at = content.size() - 2 * 64 - sizeof(std::uint64_t);
  const std::size_t at = content.rfind(bytes_of(std::uint64_t{64}), offset_at);
  REQUIRE(at != std::string::npos);
  for (const std::uint64_t offset : {std::uint64_t{0}, std::uint64_t{32}}) {
    std::string aliased = content;
    aliased.replace(at, sizeof offset, bytes_of(offset));
    const temporary_file file(aliased);
    require_file_error(read_everything, file.path(), {"begin within those of"});
  }
}

TEST_CASE("gguf: what cannot be opened is named") {
  require_file_error(read_everything, "/nonexistent/model.gguf", {"cannot open"});
  require_file_error(read_everything, std::filesystem::temp_directory_path().string(),
                     {"not a regular file"});
}

}  // namespace test_gguf
