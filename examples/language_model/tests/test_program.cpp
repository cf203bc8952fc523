// The program as a whole, with its standard output somewhere else.

#include <algorithm>
#include <cstdio>
#include <fcntl.h>
#include <iostream>
#include <unistd.h>

#include "files.hpp"
#include "program.hpp"
#include "tiny_model.hpp"

namespace test_program {
using namespace language_model;

namespace {

/// A standard stream that goes to another place while this object lives.
class redirected {
 public:
  /// path: a null pointer closes the stream's descriptor.
  redirected(std::FILE* stream, int descriptor, const char* path)
      : stream_(stream), descriptor_(descriptor) {
    std::cout.flush();
    std::fflush(stream_);
    saved_ = ::fcntl(descriptor_, F_DUPFD_CLOEXEC, 10);
    if (path == nullptr) {
      ::close(descriptor_);
      return;
    }
    const int target = ::open(path, O_WRONLY | O_CLOEXEC);
    ::dup2(target, descriptor_);
    ::close(target);
  }
  ~redirected() {
    std::fflush(stream_);
    std::clearerr(stream_);
    ::dup2(saved_, descriptor_);
    ::close(saved_);
  }
  redirected(const redirected&) = delete;
  redirected& operator=(const redirected&) = delete;

 private:
  std::FILE* stream_;
  int descriptor_, saved_;
};

struct outcome {
  int exit_code;
  std::string out, err;
};

/// output: a null pointer is a closed standard output, "" one that is caught.
outcome run(std::vector<std::string> arguments, const char* output = "") {
  arguments.insert(arguments.begin(), "language_model");
  std::vector<const char*> pointers;
  for (const std::string& argument : arguments) pointers.push_back(argument.c_str());
  const temporary_file out, err;
  outcome result{};
  const bool caught = output != nullptr && *output == '\0';
  {
    const redirected to_err(stderr, STDERR_FILENO, err.path().c_str());
    const redirected to_out(stdout, STDOUT_FILENO, caught ? out.path().c_str() : output);
    result.exit_code = run_program(static_cast<int>(pointers.size()), pointers.data());
  }
  result.out = read_file(out.path());
  result.err = read_file(err.path());
  return result;
}

/// A model, a text and routers for it, and every command that prints.
struct workshop {
  temporary_file model{tiny_model_file()}, text, router, trained;
  std::vector<std::vector<std::string>> commands;

  workshop() {
    std::string words;
    while (words.size() < 3000) words += "the " + std::to_string(words.size() * 7919 % 1000) + " x";
    text.write(words);
    const auto command = [&](std::vector<std::string> more) {
      for (const char* option : {"--model", "--text"}) {
        more.push_back(option);
        more.push_back(option == std::string_view("--model") ? model.path() : text.path());
      }
      return more;
    };
    const std::vector<std::string> windows = {"--context", "32", "--skip", "0", "--threads", "1"};
    const auto with_windows = [&](std::vector<std::string> more) {
      more.insert(more.end(), windows.begin(), windows.end());
      return command(more);
    };
    commands = {
        with_windows({"calibrate", "--groups", "2", "--dimensions", "4", "-o", router.path()}),
        with_windows({"perplexity", "--windows", "1", "--router", router.path()}),
        with_windows({"perplexity", "--windows", "1"}),
        with_windows({"groups", "--router", router.path()}),
        with_windows({"train", "--groups", "2", "--dimensions", "4", "--steps", "1", "--rows", "8",
                      "-o", trained.path()}),
        {"generate", "--model", model.path(), "--prompt", "the the", "-n", "3", "--threads", "1",
         "--ignore-end"},
        {"generate",    "--model",  model.path(), "--prompt-file", text.path(),   "--prompt-tokens",
         "40",          "-n",       "3",          "--attention",   "focus",       "--router",
         router.path(), "--window", "4",          "--cache",       "int8",        "--temperature",
         "1",           "--top-p",  "0.9",        "--quiet",       "--ignore-end"},
        with_windows({"perplexity", "--windows", "1", "--router", router.path(), "--cached", "9"}),
        command({"tokens"}),
        {"--help"},
        {"perplexity", "--help"}};
  }
};

std::size_t lines(const std::string& text) {
  return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
}

}  // namespace

TEST_CASE("program: every command prints, and says so where it cannot") {
  const workshop w;
  for (const auto& command : w.commands) {
    INFO(command[0] << " " << command[1 % command.size()]);
    const outcome good = run(command);
    INFO(good.err);
    REQUIRE(good.exit_code == 0);
    REQUIRE(!good.out.empty());
    for (const char* output : {"/dev/full", static_cast<const char*>(nullptr)}) {
      const outcome bad = run(command, output);
      INFO((output == nullptr ? "closed" : output) << ": " << bad.err);
      CHECK(bad.exit_code == 1);
      CHECK(bad.err.find("language_model: cannot write to standard output") != std::string::npos);
      // Nothing but that line, and a warning of train's.
      CHECK(lines(bad.err) <= lines(good.err) + 1);
    }
  }
}

TEST_CASE("program: wrong usage is 2, a file that is not there 1, each with one line") {
  const outcome usage = run({"tokens"});
  CHECK(usage.exit_code == 2);
  CHECK(usage.out.empty());
  CHECK(lines(usage.err) == 1);
  const outcome missing = run({"tokens", "--model", "/nonexistent/m", "--text", "t"});
  CHECK(missing.exit_code == 1);
  CHECK(missing.out.empty());
  CHECK(missing.err == "language_model: /nonexistent/m: cannot open: No such file or directory\n");
}

TEST_CASE("program: a text too short says for what windows are needed") {
  const temporary_file model(tiny_model_file()), text(std::string(300, 'x'));
  const auto perplexity = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"perplexity", "--model", model.path(), "--text", text.path(),
                               "--context", "64", "--skip", "0", "--threads", "1"});
    return run(more);
  };
  const outcome calibration = perplexity({"--windows", "1"});
  CHECK(calibration.exit_code == 1);
  CHECK(calibration.err ==
        "language_model: " + text.path() +
            ": too short: it has 300 tokens; 8 windows of 64 tokens are needed "
            "from token 64 on, to calibrate centroids (--router gives others)\n");
  const outcome measured = perplexity({"--windows", "5"});
  CHECK(measured.exit_code == 1);
  CHECK(measured.err == "language_model: " + text.path() +
                            ": too short: it has 300 tokens; 5 windows of 64 tokens are needed "
                            "from token 0 on\n");
}

TEST_CASE("program: a number of groups that no router has") {
  const workshop w;
  REQUIRE(run(w.commands[0]).exit_code == 0);
  for (const auto& [groups, expected] :
       {std::pair{"4", "it has 2 groups, not the number"}, std::pair{"2,4", "no router"}}) {
    auto command = w.commands[1];
    command.insert(command.end(), {"--groups", groups});
    const outcome refused = run(command);
    INFO(refused.err);
    CHECK(refused.exit_code != 0);
    CHECK(refused.err.find(expected) != std::string::npos);
  }
}

}  // namespace test_program
