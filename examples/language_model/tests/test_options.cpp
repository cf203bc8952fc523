#include "catch.hpp"
#include "options.hpp"

namespace test_options {
using namespace language_model;

namespace {

command_line parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "language_model");
  return parse_command_line(static_cast<int>(arguments.size()), arguments.data());
}

/// The exit code and the text of a command line that is not carried out.
usage_message message_of(const std::vector<const char*>& arguments) {
  try {
    parse(arguments);
  } catch (const usage_message& message) {
    return message;
  }
  return {"", -1};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("options: a command with all that it takes") {
  const command_line command = parse(
      {"perplexity", "--model",   "m.gguf", "--text",    "t.txt", "--context",   "2048", "--groups",
       "4,8",        "--top-k",   "1,2",    "--window",  "64",    "--sinks",     "2",    "--layers",
       "2-5",        "--threads", "3",      "--windows", "2",     "--skip",      "0",    "--router",
       "a",          "--router",  "b",      "--json",    "j",     "--masks-out", "k"});
  REQUIRE(command.perplexity);
  CHECK_FALSE(command.calibrate);
  const perplexity_options& o = *command.perplexity;
  CHECK(o.common.model == "m.gguf");
  CHECK(o.common.threads == 3);
  CHECK(o.text.texts == std::vector<std::string>{"t.txt"});
  CHECK(o.text.context == 2048);
  CHECK(o.text.windows == 2);
  CHECK(o.text.skip == 0);
  CHECK(o.groups == std::vector<index_t>{4, 8});
  CHECK(o.top_k == "1,2");
  CHECK(o.window == 64);
  CHECK(o.sinks == 2);
  CHECK(o.layers == "2-5");
  CHECK(o.routers == std::vector<std::string>{"a", "b"});
  CHECK(o.json == "j");
  CHECK(o.masks == "k");
}

TEST_CASE("options: generation") {
  const command_line command = parse({"generate", "--model", "m", "--prompt", "p", "--attention",
                                      "focus", "--router", "r", "--temperature", "0.5", "--top-p",
                                      "0.9", "--seed", "7", "-n", "9", "--cache", "bf16"});
  REQUIRE(command.generate);
  CHECK(command.generate->router == "r");
  CHECK(command.generate->tokens == 9);
  CHECK(command.generate->seed == 7);
  CHECK(command.generate->cache == "bf16");
  CHECK(contains(message_of({"generate", "--model", "m"}).text, "--prompt"));
  CHECK(contains(
      message_of({"generate", "--model", "m", "--prompt", "p", "--attention", "focus"}).text,
      "--router"));
  CHECK(contains(message_of({"generate", "--model", "m", "--prompt", "p", "--system", "s"}).text,
                 "--chat"));
  CHECK(
      contains(message_of({"generate", "--model", "m", "--prompt", "p", "--prompt-file", "f"}).text,
               "--prompt"));
  CHECK(contains(
      message_of({"perplexity", "--model", "m", "--text", "t", "--cached", "4", "--masks-out", "k"})
          .text,
      "--masks-out"));
}

TEST_CASE("options: defaults") {
  const command_line command = parse({"perplexity", "--model", "m", "--text", "t"});
  REQUIRE(command.perplexity);
  CHECK(command.perplexity->window == 128);
  CHECK(command.perplexity->sinks == 1);
  CHECK(command.perplexity->text.skip == 2000);
  const command_line calibrate =
      parse({"calibrate", "--model", "m", "--text", "t", "u", "-o", "r"});
  REQUIRE(calibrate.calibrate);
  CHECK(calibrate.calibrate->text.texts == std::vector<std::string>{"t", "u"});
  CHECK(calibrate.calibrate->groups == 8);
}

TEST_CASE("options: training") {
  const command_line command = parse({"train",
                                      "--model",
                                      "m",
                                      "--text",
                                      "a",
                                      "b",
                                      "--groups",
                                      "8,16",
                                      "--separate-keys",
                                      "--steps",
                                      "200",
                                      "--tokens",
                                      "512",
                                      "--rows",
                                      "128",
                                      "--learning-rate",
                                      "0.001",
                                      "--warm-up",
                                      "0.1",
                                      "--iterations",
                                      "30",
                                      "--d-group",
                                      "32",
                                      "--window",
                                      "64",
                                      "--sinks",
                                      "2",
                                      "--seed",
                                      "5",
                                      "--checkpoint",
                                      "c",
                                      "-o",
                                      "r"});
  REQUIRE(command.train);
  const train_options& o = *command.train;
  CHECK(o.text.texts == std::vector<std::string>{"a", "b"});
  CHECK(o.text.context == 512);
  CHECK(o.groups == std::vector<index_t>{8, 16});
  CHECK(o.dimensions == 32);
  CHECK(o.training.separate_keys);
  CHECK(o.training.steps == 200);
  CHECK(o.training.rows == 128);
  CHECK(o.training.learning_rate == 0.001f);
  CHECK(o.training.warm_up == 0.1f);
  CHECK(o.training.iterations == 30);
  CHECK(o.training.window == 64);
  CHECK(o.training.sinks == 2);
  CHECK(o.training.seed == 5);
  CHECK(o.checkpoint == "c");
  CHECK(o.output == "r");
  CHECK(message_of({"train", "--model", "m", "--text", "t", "-o", "r", "--steps", "0"}).exit_code ==
        2);
}

TEST_CASE("options: help is not an error, wrong usage is, with exit code 2") {
  for (const char* command : {"perplexity", "calibrate", "train", "groups", "tokens"}) {
    const usage_message help = message_of({command, "--help"});
    CHECK(help.exit_code == 0);
    CHECK(contains(help.text, "--model"));
    CHECK(message_of({command}).exit_code == 2);
  }
  CHECK(contains(message_of({"--help"}).text, "perplexity"));
  CHECK(message_of({}).exit_code == 2);
  CHECK(message_of({"nonsense"}).exit_code == 2);
  const usage_message unknown =
      message_of({"tokens", "--model", "m", "--text", "t", "--colour", "red"});
  CHECK(unknown.exit_code == 2);
  CHECK(contains(unknown.text, "--colour"));
  CHECK(message_of({"perplexity", "--model", "m", "--text", "t", "--context", "many"}).exit_code ==
        2);
  CHECK(message_of({"perplexity", "--model", "m", "--text", "t", "--context", "1"}).exit_code == 2);
  CHECK(message_of({"perplexity", "--model", "m", "--text", "t", "--groups", "65"}).exit_code == 2);
  CHECK(message_of({"perplexity", "--model", "m", "--text", "t", "--window", "-2"}).exit_code == 2);
  CHECK(message_of({"calibrate", "--model", "m", "--text", "t", "-o", "r", "--temperature", "0"})
            .exit_code == 2);
}

TEST_CASE("options: numbers are decimal, finite and shown as they were typed") {
  const auto calibrate = [](const char* option, const char* value) {
    return std::vector<const char*>{"calibrate", "--model", "m",    "--text", "t",
                                    "-o",        "r",       option, value};
  };
  CHECK(parse(calibrate("--groups", "010")).calibrate->groups == 10);
  CHECK(parse(calibrate("--context", "0100")).calibrate->text.context == 100);
  CHECK(parse(calibrate("--temperature", "1e-3")).calibrate->temperature == 1e-3f);
  CHECK(parse(calibrate("--seed", "18446744073709551615")).calibrate->seed == ~std::uint64_t{0});
  const auto refused = [&](const std::vector<const char*>& arguments, const std::string& expected) {
    const usage_message message = message_of(arguments);
    INFO(message.text);
    CHECK(message.exit_code == 2);
    CHECK(contains(message.text, expected));
    CHECK(contains(message.text, std::string("'") + arguments.back() + "'"));
  };
  for (const char* wrong : {"0x8", "8.0", "1e1", "+8", " 8", "8 ", "", "eight", "65", "-1", "nan"})
    refused(calibrate("--groups", wrong), "expected a whole number from 1 to 64");
  for (const char* wrong : {"-1", "18446744073709551616", "1.5"})
    refused(calibrate("--seed", wrong), "from 0 to 18446744073709551615");
  for (const char* wrong : {"nan", "-nan", "inf", "0", "1e-60", "0x1p-3", "0.1f", "-0.1"}) {
    refused(calibrate("--temperature", wrong), "expected a number from 0.001 to 1000");
    for (const char* option : {"--learning-rate", "--temperature"})
      CHECK(message_of({"train", "--model", "m", "--text", "t", "-o", "r", option, wrong})
                .exit_code == 2);
  }
  refused({"train", "--model", "m", "--text", "t", "-o", "r", "--learning-rate", "0"},
          "from 1e-08 to 1000");
  refused({"train", "--model", "m", "--text", "t", "-o", "r", "--warm-up", "nan"}, "from 0 to 1");
}

TEST_CASE("options: lists of top-k") {
  const auto list = parse_top_k("1,2,4:1", 4);
  REQUIRE(list.size() == 3);
  CHECK(list[1].query == 2);
  CHECK(list[1].key == 2);
  CHECK(list[2].query == 4);
  CHECK(list[2].key == 1);
  for (const char* wrong : {"", "0", "5", "1,", "1:2:3", "a", "1 2", "-1", "2:"})
    CHECK_THROWS_AS(parse_top_k(wrong, 4), usage_message);
}

TEST_CASE("options: lists of layers") {
  const std::vector<bool> none(6);
  const auto with = [&](std::vector<std::size_t> layers) {
    std::vector<bool> result = none;
    for (const std::size_t l : layers) result[l] = true;
    return result;
  };
  CHECK(parse_layers("all", 6) == std::vector<bool>(6, true));
  CHECK(parse_layers("0", 6) == with({0}));
  CHECK(parse_layers("0,3-5", 6) == with({0, 3, 4, 5}));
  for (const char* wrong : {"", "6", "2-6", "3-2", "1,", "-1", "x", "1-2-3"})
    CHECK_THROWS_AS(parse_layers(wrong, 6), usage_message);
}

}  // namespace test_options
