// Generation over caches against passes without them, the choice of tokens, and chats.

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "attention_method.hpp"
#include "calibrate.hpp"
#include "chat_template.hpp"
#include "files.hpp"
#include "generation.hpp"
#include "loaded_model.hpp"
#include "model.hpp"
#include "tiny_model.hpp"

namespace test_generation {
using namespace language_model;

namespace {

struct small_model {
  temporary_file file{tiny_model_file({.separate_output = true})};
  language_model::model model{gguf_file(file.path())};
  thread_pool pool{2};
  std::vector<token_id> tokens;
  language_model::router router;

  small_model() {
    std::mt19937 random(13);
    tokens.resize(200);
    for (token_id& token : tokens) token = static_cast<token_id>(random() % 260);
    const token_windows windows = {std::span<const token_id>(tokens).first(100),
                                   std::span<const token_id>(tokens).last(100)};
    router = calibrate(model, windows, {.groups = 3, .dimensions = 4}, pool, [](index_t) {});
  }

  std::vector<attention_method> methods() const {
    using kind = attention_method::kind;
    const std::vector<bool> both = {true, true}, second = {false, true};
    const focus::pattern_options pattern{.window = 6, .sink_tokens = 1};
    return {{.layers = both},
            {.what = kind::windowed, .pattern = pattern, .layers = both},
            {.what = kind::focus, .pattern = pattern, .layers = both, .router = &router},
            {.what = kind::focus,
             .pattern = pattern,
             .layers = second,
             .router = &router,
             .k = {.query = 2, .key = 1}}};
  }
};

/// The most likely next token by a pass over the whole text, and by how much it is ahead.
std::pair<token_id, float> next_without_cache(small_model& s, const attention_method& method,
                                              std::span<const token_id> text) {
  forward_pass pass(s.model, s.pool);
  attention_runner runner(method, s.pool);
  matrix stream, logits;
  pass.embed(text, stream);
  for (index_t l = 0; l < s.model.config().layers; ++l) pass.layer(l, stream, std::ref(runner));
  pass.next_token_logits(stream, logits);
  std::mt19937_64 random(1);
  const token_id best = choose_token(logits, {}, random);
  float second = -1e30f;
  for (token_id t = 0; t < logits.cols(); ++t)
    if (t != best) second = std::max(second, logits(0, t));
  return {best, logits(0, best) - second};
}

}  // namespace

TEST_CASE("generation: greedy tokens are those of passes without caches") {
  small_model s;
  for (const attention_method& method : s.methods())
    for (const index_t block : {1, 7, 64, 1000}) {
      INFO("method " << static_cast<int>(method.what) << ", block " << block);
      std::vector<token_id> text(s.tokens.begin(), s.tokens.begin() + 70);
      growing_sequence sequence(s.model, method, cache_type::f32, s.pool);
      index_t last_progress = 0;
      sequence.extend(text, block, [&](index_t done) {
        CHECK(done - last_progress <= block);
        last_progress = done;
      });
      CHECK(last_progress == 70);
      std::mt19937_64 random(1);
      for (int made = 0; made < 25; ++made) {
        const auto [expected, ahead] = next_without_cache(s, method, text);
        const token_id next = choose_token(sequence.logits(), {}, random);
        // Nearer than rounding, either would do.
        if (ahead > 1e-4f) REQUIRE(next == expected);
        text.push_back(next);
        sequence.extend(std::span(&next, 1), 1);
      }
      CHECK(sequence.caches().size() == 95);
    }
}

TEST_CASE("generation: the loss over caches is that without") {
  small_model s;
  for (const attention_method& method : s.methods()) {
    forward_pass pass(s.model, s.pool);
    attention_runner runner(method, s.pool);
    const double loss = pass.negative_log_likelihood(s.tokens, std::ref(runner));
    for (const auto& [type, tolerance] : {std::pair(cache_type::f32, 1e-5),
                                          {cache_type::f16, 1e-3},
                                          {cache_type::bf16, 1e-2},
                                          {cache_type::int8, 1e-2}}) {
      growing_sequence sequence(s.model, method, type, s.pool);
      CHECK(sequence.negative_log_likelihood(s.tokens, 33) == Approx(loss).epsilon(tolerance));
      // Rounded values give the layers behind other hidden states, and these other groups.
      if (type == cache_type::f32) CHECK(sequence.caches().pairs() == Approx(runner.pairs()));
    }
  }
}

TEST_CASE("generation: what is read and held") {
  small_model s;
  const auto methods = s.methods();
  growing_sequence full(s.model, methods[0], cache_type::f32, s.pool);
  growing_sequence window(s.model, methods[1], cache_type::int8, s.pool);
  full.extend(s.tokens, 50);
  window.extend(s.tokens, 50);
  // 2 layers of 2 kv heads, K and V of 6 elements; 200 keys, and 7 with a sink.
  CHECK(full.caches().bytes_of_last_token() == 2 * 2 * 12 * 200 * 4);
  CHECK(window.caches().bytes_of_last_token() == 2 * 2 * 12 * 8);
  CHECK(full.caches().memory_bytes() >= full.caches().bytes_of_last_token());
  CHECK(full.caches().seconds() > 0);
}

TEST_CASE("generation: tokens are drawn from those that have the share together") {
  matrix logits(1, 5);
  const auto log = [](double x) {
    return static_cast<float>(std::log(x));
  };
  logits << log(0.1), log(0.4), log(0.05), log(0.3), log(0.15);
  std::mt19937_64 random(3);
  CHECK(choose_token(logits, {.temperature = 0}, random) == 1);
  const auto shares = [&](const sampling& how) {
    std::vector<double> share(5);
    for (int draw = 0; draw < 20000; ++draw)
      share[static_cast<std::size_t>(choose_token(logits, how, random))] += 1 / 20000.0;
    return share;
  };
  const double margin = 4 * std::sqrt(0.25 / 20000);  // four standard deviations
  const auto all = shares({.temperature = 1});
  for (std::size_t t = 0; t < 5; ++t)
    CHECK(std::abs(all[t] - std::exp(static_cast<double>(logits(0, static_cast<index_t>(t))))) <
          margin);
  const auto most = shares({.temperature = 1, .top_p = 0.6f});  // 0.4 and 0.3
  CHECK(std::abs(most[1] - 4.0 / 7) < margin);
  CHECK(std::abs(most[3] - 3.0 / 7) < margin);
  const auto one = shares({.temperature = 1, .top_p = 0});
  CHECK(one[1] > 0.999);
  const auto cold = shares({.temperature = 0.5f});  // squares
  CHECK(std::abs(cold[3] - 0.09 / 0.285) < margin);
  // The same seed, the same tokens.
  std::mt19937_64 a(9), b(9);
  for (int draw = 0; draw < 50; ++draw)
    CHECK(choose_token(logits, {.temperature = 2}, a) ==
          choose_token(logits, {.temperature = 2}, b));
}

namespace {

std::string file_with_template(const std::string& text) {
  gguf_writer file;
  add_config(file);
  std::vector<std::string> names = {"<end>", "<|im_start|>", "<|im_end|>"};
  std::vector<std::int32_t> types = {3, 3, 3};
  for (unsigned byte = 0; byte < 256; ++byte) names.push_back(byte_character(byte));
  types.resize(names.size(), 1);
  file.string("tokenizer.ggml.model", "gpt2");
  file.string("tokenizer.ggml.pre", "gpt-2");
  file.strings("tokenizer.ggml.tokens", names);
  file.i32s("tokenizer.ggml.token_type", types);
  file.strings("tokenizer.ggml.merges", {});
  if (!text.empty()) file.string("tokenizer.chat_template", text);
  add_weights(file);
  return file.bytes();
}

const std::string chat_ml =
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}";

}  // namespace

TEST_CASE("chat: a message between its tokens, with the template's system message or another") {
  const temporary_file file(file_with_template(chat_ml));
  const gguf_file opened(file.path());
  const tokenizer words(opened);
  const chat_template chat(opened, words);
  CHECK(chat.end_of_message() == 2);
  const auto by_hand = [&](const std::string& system) {
    std::vector<token_id> tokens;
    const auto add = [&](const std::vector<token_id>& more) {
      tokens.insert(tokens.end(), more.begin(), more.end());
    };
    add({1});
    add(words.encode("system\n" + system));
    add({2});
    add(words.encode("\n"));
    add({1});
    // What looks like a token of control in a message is text.
    add(words.encode("user\nhi <|im_end|>"));
    add({2});
    add(words.encode("\n"));
    add({1});
    add(words.encode("assistant\n"));
    return tokens;
  };
  CHECK(chat.ask("hi <|im_end|>", std::nullopt) == by_hand("Be brief."));
  CHECK(chat.ask("hi <|im_end|>", "Be kind.") == by_hand("Be kind."));
}

TEST_CASE("chat: no template, or another one, is refused") {
  for (const auto& [text, expected] : std::vector<std::pair<std::string, std::string>>{
           {"", "no chat template"}, {"[INST] {{ message }} [/INST]", "not ChatML"}}) {
    const temporary_file file(file_with_template(text));
    require_file_error(
        [](const std::string& path) {
          const gguf_file opened(path);
          chat_template(opened, tokenizer(opened));
        },
        file.path(), {expected});
  }
}

}  // namespace test_generation
