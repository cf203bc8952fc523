#include <random>

#include "files.hpp"
#include "router_file.hpp"
#include "safetensors.hpp"

namespace test_router_file {
using namespace language_model;

namespace {

constexpr model_config config{.layers = 2,
                              .d_model = 6,
                              .heads = 1,
                              .kv_heads = 1,
                              .head_dim = 6,
                              .feed_forward = 1,
                              .vocabulary = 1,
                              .context = 1,
                              .rope_dimensions = 6,
                              .rope_base = 1,
                              .rms_epsilon = 1};

matrix random_matrix(index_t rows, index_t columns) {
  static std::mt19937 random(5);
  std::normal_distribution<float> normal;
  matrix m(rows, columns);
  for (index_t i = 0; i < m.size(); ++i) m.data()[i] = normal(random);
  return m;
}

token_router random_token_router(bool bias) {
  token_router result;
  result.projection = random_matrix(6, 3);
  if (bias) result.bias = random_matrix(1, 3).row(0);
  result.centroids = random_matrix(4, 3);
  result.log_group_scale = random_matrix(1, 4).row(0);
  return result;
}

router random_router() {
  router result;
  result.metric = focus::similarity::cosine;
  result.temperature = 0.07f;
  result.information["text"] = "a \"novel\"";
  result.layers.push_back({random_token_router(true), std::nullopt});
  result.layers.push_back({random_token_router(false), random_token_router(true)});
  return result;
}

void check_equal(const token_router& a, const token_router& b) {
  CHECK(a.projection == b.projection);
  CHECK(a.bias.size() == b.bias.size());
  if (a.bias.size() == b.bias.size()) CHECK(a.bias == b.bias);
  CHECK(a.centroids == b.centroids);
  CHECK(a.log_group_scale == b.log_group_scale);
}

std::string safetensors_bytes(const std::string& header, const std::string& data = {}) {
  return bytes_of(std::uint64_t{header.size()}) + header + data;
}

void load(const std::string& path) {
  load_router(path, config);
}

/// Parts of a router file, to leave some out or to change them.
struct parts {
  safetensors_writer out;
  parts() {
    out.metadata("similarity", "dot");
    out.metadata("temperature", "0.1");
  }
  void add(const std::string& name, std::vector<std::int64_t> shape) {
    std::size_t count = 1;
    for (const std::int64_t extent : shape) count *= static_cast<std::size_t>(extent);
    out.add(name, std::move(shape), std::span<const float>(std::vector<float>(count, 0.5f)));
  }
  void add_layer(const std::string& prefix, std::int64_t d_model, std::int64_t groups,
                 std::int64_t d_group = 3) {
    add(prefix + "projection", {d_model, d_group});
    add(prefix + "centroids", {groups, d_group});
    add(prefix + "log_group_scale", {groups});
  }
};

void require_refused(const parts& p, const std::vector<std::string>& expected) {
  const temporary_file file;
  p.out.write(file.path());
  require_file_error(load, file.path(), expected);
}

}  // namespace

TEST_CASE("router file: what is saved is loaded, routers of keys included") {
  const router saved = random_router();
  const temporary_file file;
  save_router(saved, file.path());
  const router loaded = load_router(file.path(), config);
  CHECK(loaded.metric == saved.metric);
  CHECK(loaded.temperature == saved.temperature);
  CHECK(loaded.information.at("text") == "a \"novel\"");
  CHECK(loaded.groups() == 4);
  REQUIRE(loaded.layers.size() == 2);
  check_equal(loaded.layers[0].query, saved.layers[0].query);
  check_equal(loaded.layers[1].query, saved.layers[1].query);
  CHECK_FALSE(loaded.layers[0].key);
  REQUIRE(loaded.layers[1].key);
  check_equal(*loaded.layers[1].key, *saved.layers[1].key);
}

TEST_CASE("router file: keys with a projection of their own may share the rest") {
  parts p;
  p.add_layer("layers.0.", 6, 4);
  p.add_layer("layers.1.", 6, 4);
  p.add("layers.1.key_projection", {6, 3});
  const temporary_file file;
  p.out.write(file.path());
  const router loaded = load_router(file.path(), config);
  REQUIRE(loaded.layers[1].key);
  CHECK(loaded.layers[1].key->centroids == loaded.layers[1].query.centroids);
  CHECK(loaded.layers[1].key->log_group_scale == loaded.layers[1].query.log_group_scale);
}

TEST_CASE("router file: F16 and BF16 are widened") {
  const auto tensor = [](const char* type, const std::string& data) {
    const temporary_file file(safetensors_bytes(
        std::string(R"({"t":{"dtype":")") + type + R"(","shape":[1,2],"data_offsets":[0,4]}})",
        data));
    return safetensors_file(file.path()).floats("t");
  };
  CHECK(tensor("F16", bytes_of(std::uint16_t{0x3c00}, std::uint16_t{0xc000})) ==
        std::vector<float>{1, -2});
  CHECK(tensor("BF16", bytes_of(std::uint16_t{0x3f80}, std::uint16_t{0xc000})) ==
        std::vector<float>{1, -2});
}

TEST_CASE("router file: half precision rounds what fits, and keeps the rest") {
  router saved = random_router();
  saved.layers[1].query.centroids(0, 0) = 1e6f;
  const temporary_file file;
  save_router(saved, file.path(), router_precision::f16);
  const router loaded = load_router(file.path(), config);
  const safetensors_file raw(file.path());
  CHECK(raw.tensors().at("layers.1.key_projection").dtype == "F16");
  CHECK(raw.tensors().at("layers.1.centroids").dtype == "F32");
  CHECK(raw.tensors().at("layers.0.log_group_scale").dtype == "F32");
  CHECK(loaded.layers[1].query.centroids == saved.layers[1].query.centroids);
  CHECK(loaded.layers[0].query.log_group_scale == saved.layers[0].query.log_group_scale);
  const matrix &a = loaded.layers[0].query.projection, &b = saved.layers[0].query.projection;
  CHECK(a != b);
  CHECK(((a - b).array().abs() <= b.array().abs() * 0x1p-11f + 0x1p-25f).all());
}

TEST_CASE("router file: files cut or damaged anywhere give one clear line") {
  parts p;
  p.add_layer("layers.0.", 6, 2, 1);
  p.add_layer("layers.1.", 6, 2, 1);
  const temporary_file file;
  p.out.write(file.path());
  damage_everywhere(read_file(file.path()), load);
}

TEST_CASE("router file: a router for another model is refused with both shapes") {
  parts shallow;
  shallow.add_layer("layers.0.", 6, 4);
  require_refused(shallow, {"1 layers, d_model 6, 4 groups", "2 layers, d_model 6"});
  parts narrow;
  narrow.add_layer("layers.0.", 5, 4);
  narrow.add_layer("layers.1.", 5, 4);
  require_refused(narrow, {"2 layers, d_model 5", "2 layers, d_model 6"});
}

TEST_CASE("router file: tensors that do not fit together are named") {
  parts none;
  require_refused(none, {"layers.0.projection"});
  parts mixed;
  mixed.add_layer("layers.0.", 6, 4);
  mixed.add_layer("layers.1.", 6, 5);
  require_refused(mixed, {"layer 1", "5 groups", "4 groups"});
  parts many;
  many.add_layer("layers.0.", 6, 65);
  many.add_layer("layers.1.", 6, 65);
  require_refused(many, {"65 groups", "up to 64"});
  parts flat;
  flat.add("layers.0.projection", {18});
  require_refused(flat, {"layers.0.projection", "1 dimensions"});
  parts unlike;
  unlike.add("layers.0.projection", {6, 3});
  unlike.add("layers.0.centroids", {4, 2});
  require_refused(unlike, {"layers.0.centroids", "2 columns", "3"});
  parts half;
  half.add_layer("layers.0.", 6, 4);
  half.add_layer("layers.1.", 6, 4);
  half.add("layers.1.key_bias", {3});
  require_refused(half, {"'layers.1.key_bias'", "without 'layers.1.key_projection'"});
  parts more;
  more.add_layer("layers.0.", 6, 4);
  more.add_layer("layers.1.", 6, 4);
  more.add("layers.2.bias", {3});
  require_refused(more, {"'layers.2.bias'", "no part of one of 2 layers"});
  parts gap;
  gap.add_layer("layers.0.", 6, 4);
  gap.add_layer("layers.2.", 6, 4);
  require_refused(gap, {"'layers.2.centroids'", "no part of one of 1 layers"});
  parts unrelated;
  unrelated.add_layer("layers.0.", 6, 4);
  unrelated.add_layer("layers.1.", 6, 4);
  unrelated.add("optimizer", {3});
  require_refused(unrelated, {"'optimizer'", "no part of one of 2 layers"});
  parts scales;
  scales.add("layers.0.projection", {6, 3});
  scales.add("layers.0.centroids", {4, 3});
  scales.add("layers.0.log_group_scale", {3});
  require_refused(scales, {"layers.0.log_group_scale", "length 3", "expected 4"});
  parts infinite;
  infinite.add_layer("layers.0.", 6, 1);
  infinite.out.add("layers.0.log_group_scale", {1},
                   std::span<const float>(std::vector<float>{1.0f / 0.0f}));
  require_refused(infinite, {"layers.0.log_group_scale", "not finite"});
  parts metric;
  metric.out.metadata("similarity", "euclid");
  require_refused(metric, {"'euclid'", "dot, cosine"});
  for (const char* wrong : {"", "0", "-1", "nan", "inf", "0.1x", "warm"}) {
    parts temperature;
    temperature.out.metadata("temperature", wrong);
    require_refused(temperature, {"temperature"});
  }
}

TEST_CASE("safetensors: damaged headers are named") {
  const auto refused = [](const std::string& content, const std::vector<std::string>& expected) {
    const temporary_file file(content);
    require_file_error([](const std::string& path) { safetensors_file{path}; }, file.path(),
                       expected);
  };
  refused("", {"8 bytes"});
  refused(bytes_of(~std::uint64_t{0}) + "{}", {"truncated?"});
  refused(safetensors_bytes("nonsense"), {"not a JSON object"});
  refused(safetensors_bytes("{nonsense}"), {"not valid JSON"});
  refused(safetensors_bytes("{\"t\":\"\xff\"}"), {"not valid JSON"});
  refused(safetensors_bytes("[]"), {"not a JSON object"});
  refused(safetensors_bytes("{\"t\":" + std::string(100000, '[') + "}"), {"nested too deeply"});
  refused(safetensors_bytes(R"({"__metadata__":{"a":1}})"), {"'a'", "not a string"});
  refused(safetensors_bytes(R"({"t":1})"), {"'t'", "dtype"});
  const auto tensor = [](const char* dtype, const char* shape, const char* offsets) {
    return std::string("\"t\":{\"dtype\":\"") + dtype + "\",\"shape\":" + shape +
           ",\"data_offsets\":" + offsets + "}";
  };
  refused(safetensors_bytes("{" + tensor("F8", "[1]", "[0,4]") + "}", "1234"),
          {"'F8'", "safetensors do not have"});
  refused(safetensors_bytes("{" + tensor("F32", "[1]", "[0,8]") + "}", "1234"),
          {"'t'", "truncated?"});
  refused(safetensors_bytes("{" + tensor("F32", "[1]", "[4,0]") + "}", "1234"), {"'t'"});
  refused(safetensors_bytes("{" + tensor("F32", "[2]", "[0,4]") + "}", "1234"),
          {"'t'", "its shape needs 8"});
  refused(safetensors_bytes("{" + tensor("F32", "[-1]", "[0,4]") + "}", "1234"),
          {"'t'", "non-negative"});
  refused(safetensors_bytes("{" + tensor("F32", "[4611686018427387904,4]", "[0,4]") + "}", "1234"),
          {"64 bits"});
  refused(safetensors_bytes("{" + tensor("F4", "[3]", "[0,2]") + "}", "12"),
          {"'t'", "whole bytes"});
  const std::string once = tensor("F32", "[1]", "[0,4]");
  refused(safetensors_bytes("{" + once + "," + once + "}", "1234"), {"'t'", "twice"});
}

TEST_CASE("safetensors: a header is one object from the first byte on, then spaces") {
  const auto read = [](const std::string& header) {
    const temporary_file file(safetensors_bytes(header));
    safetensors_file{file.path()};
  };
  REQUIRE_NOTHROW(read("{}"));
  REQUIRE_NOTHROW(read("{}      "));
  REQUIRE_NOTHROW(read("{\n}"));
  using namespace std::string_literals;
  for (const std::string& header :
       {""s, " "s, " {}"s, "\xef\xbb\xbf{}"s, "{}\n"s, "{}\t "s, "{}\0"s, "{}\0\0 "s, "{} \0 }"s,
        "{}\0garbage}"s, "{\0}"s, "{}x"s, "{} {}"s, "{},"s, "{\"a\0\":1}"s}) {
    INFO(in_quotes(header));
    const temporary_file file(safetensors_bytes(header));
    require_file_error([](const std::string& path) { safetensors_file{path}; }, file.path(),
                       {"its header "});
  }
}

TEST_CASE("safetensors: data follow one another from the first byte to the last") {
  const auto content = [](const std::vector<std::pair<int, int>>& ranges, std::size_t data) {
    std::string header;
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      const auto [begin, end] = ranges[i];
      if (!header.empty()) header += ',';
      header.append("\"t").append(std::to_string(i));
      header.append(R"(":{"dtype":"U8","shape":[)").append(std::to_string(end - begin));
      header.append(R"(],"data_offsets":[)").append(std::to_string(begin)).append(",");
      header.append(std::to_string(end)).append("]}");
    }
    return safetensors_bytes(std::string("{").append(header).append("}"), std::string(data, '1'));
  };
  const auto read = [](const std::string& path) {
    safetensors_file{path};
  };
  for (const auto& ranges : std::vector<std::vector<std::pair<int, int>>>{
           {{0, 8}}, {{4, 8}, {0, 4}}, {{0, 0}, {0, 8}, {8, 8}}, {{3, 8}, {3, 3}, {0, 3}}}) {
    const temporary_file file(content(ranges, 8));
    REQUIRE_NOTHROW(read(file.path()));
  }
  const auto refused = [&](const std::vector<std::pair<int, int>>& ranges,
                           const std::vector<std::string>& expected) {
    const temporary_file file(content(ranges, 8));
    require_file_error(read, file.path(), expected);
  };
  refused({{0, 8}, {0, 8}}, {"'t1'", "begin at byte 0", "end at 8"});  // the same
  refused({{0, 5}, {4, 8}}, {"'t1'", "begin at byte 4", "end at 5"});  // an overlap
  refused({{0, 3}, {4, 8}}, {"'t1'", "begin at byte 4", "end at 3"});  // a hole
  refused({{1, 8}}, {"'t0'", "begin at byte 1", "end at 0"});          // at the beginning
  refused({{0, 4}}, {"4 bytes of data", "the file has 8"});            // at the end
  refused({}, {"0 bytes of data", "the file has 8"});
  refused({{0, 8}, {4, 4}}, {"'t1'", "begin at byte 4", "end at 8"});  // empty, inside
}

TEST_CASE("safetensors: every type of the format is known, and read where it can be") {
  for (const auto& [type, bytes] : std::vector<std::pair<std::string, int>>{
           {"BOOL", 4}, {"F4", 2}, {"F6_E2M3", 3}, {"F8_E4M3", 4}, {"F8_E5M2", 4}, {"C64", 32}}) {
    const temporary_file file(safetensors_bytes(R"({"t":{"dtype":")" + type +
                                                    R"(","shape":[2,2],"data_offsets":[0,)" +
                                                    std::to_string(bytes) + "]}}",
                                                std::string(static_cast<std::size_t>(bytes), '1')));
    const safetensors_file read(file.path());
    CHECK(read.tensors().at("t").dtype == type);
    require_file_error([&](const std::string&) { (void)read.floats("t"); }, file.path(),
                       {"'t' is of type " + type, "supported: F32, F16, BF16"});
  }
}

TEST_CASE("write_file: nothing is left behind where writing fails") {
  require_file_error([](const std::string& path) { write_file(path, "x"); },
                     "/nonexistent/folder/file", {"cannot write"});
  const temporary_file file("old");
  write_file(file.path(), "new");
  CHECK(read_file(file.path()) == "new");
}

}  // namespace test_router_file
