// The one file that knows CLI11.
#include <fmt/format.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <new>
#include <sstream>
#include <thread>

#include "cli/build_info.h"
#include "cli/command.h"
#include "cli/process_ranks.h"
#include "core/error.h"
#include "core/nearest_name.h"

namespace agoq {
namespace {

constexpr int kDone = 0;
constexpr int kRunFailed = 1;
constexpr int kBadInput = 2;

// Output that did not reach its file is a failed run: a full disk, a closed pipe.
void flush_output() {
  check(std::fflush(stdout) == 0 && std::ferror(stdout) == 0,
        "the output could not be written: is the disk full, or the reader of a pipe gone?");
}

// An error is one line, whatever a library wrote.
int report(std::string text, int status) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  std::fflush(stdout);
  if (text.empty()) {
    // Another rank says it (comm/together.h), which a launcher may end as soon as this one has.
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    return status;
  }
  // Not fmt::print, which throws where stderr is closed: then there is nobody to tell.
  text = "agoq: " + text + "\n";
  std::fwrite(text.data(), 1, text.size(), stderr);
  return status;
}

// CLI11 would make of an integer beyond 64 bits the nearest that fits, and does not say what it
// expected.
template <typename Number>
bool read_number(const std::string& text, Number& value) {
  const char* end = text.data() + text.size();
  const auto [last, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && last == end;
}

/// What is wrong with the command line, and what to do.
std::string text_of(const CLI::ParseError& error, int argc, char** argv,
                    const std::vector<Command>& commands) {
  const std::string first = argc > 1 ? argv[1] : "";
  std::vector<std::string_view> names;
  for (const Command& command : commands) {
    if (command.name == first) {
      return fmt::format("{}: {} (agoq {} --help shows the arguments)", first, error.what(), first);
    }
    names.push_back(command.name);
  }
  if (first.empty() || first[0] == '-')
    return fmt::format("{} (agoq --help shows the commands)", error.what());
  const std::string_view nearest = nearest_name(first, names);
  if (nearest.empty())
    return fmt::format("unknown command '{}'; the commands are {}", first, fmt::join(names, ", "));
  return fmt::format("unknown command '{}'; did you mean {}?", first, nearest);
}

/// What the command line asks for.
struct Parsed {
  const Command* command = nullptr;
  Action action;
  std::string help;   // to be printed instead
  std::string error;  // or what is wrong
};

Parsed parse(int argc, char** argv, const std::vector<Command>& commands, const std::string& opening) {
  CLI::App app(opening, "agoq");
  app.set_version_flag("--version", build_info().version);
  app.require_subcommand(0, 1);
  Parsed parsed;
  for (const Command& command : commands) {
    CLI::App* subcommand = app.add_subcommand(command.name, command.summary);
    Arguments arguments(*subcommand);
    subcommand->callback([&parsed, &command, declared = command.declare(arguments)] {
      parsed.command = &command;
      parsed.action = declared;
    });
  }
  try {
    app.parse(argc, argv);
    if (parsed.command == nullptr) parsed.help = app.help();
  } catch (const CLI::Success& success) {  // --help, --version
    std::ostringstream text;
    app.exit(success, text, text);
    parsed.help = text.str();
  } catch (const CLI::ParseError& error) {
    parsed.error = text_of(error, argc, argv, commands);
  }
  return parsed;
}

/// What was parsed, on the ranks that it is for.
void run(const Parsed& parsed, ProcessRanks& ranks) {
  if (!parsed.error.empty()) ranks.together([&] { fail_input("{}", parsed.error); });
  if (parsed.command == nullptr) {
    if (ranks.leads()) fmt::print("{}", parsed.help);
    return;
  }
  if (parsed.command->processes == Processes::kOne && !ranks.works_alone(parsed.command->name)) return;
  ranks.set_command(parsed.command->name);
  parsed.action(ranks);
}

}  // namespace

void Arguments::positional(const std::string& name, std::string& value, const std::string& description) {
  app_.add_option(name, value, description)->required();
}
void Arguments::positional(const std::string& name, std::vector<std::string>& values,
                           const std::string& description) {
  app_.add_option(name, values, description)->required();
}
void Arguments::option(const std::string& name, const std::string& placeholder, std::string& value,
                       const std::string& description) {
  app_.add_option(name, value, description)->option_text(placeholder);
}
void Arguments::option(const std::string& name, const std::string& placeholder,
                       std::optional<std::string>& value, const std::string& description) {
  app_.add_option_function<std::string>(
          name, [&value](const std::string& given) { value = given; }, description)
      ->option_text(placeholder)
      ->check([](const std::string& given) {
        return given.empty() ? std::string("an empty value was given") : std::string();
      });
}
void Arguments::option(const std::string& name, const std::string& placeholder, std::int64_t& value,
                       const std::string& description) {
  app_.add_option_function<std::string>(
          name, [&value](const std::string& given) { read_number(given, value); }, description)
      ->option_text(fmt::format("{} [{}]", placeholder, value))
      ->check([](const std::string& given) {
        std::int64_t ignored = 0;
        return read_number(given, ignored)
                   ? std::string()
                   : fmt::format("an integer of at most 64 bits was expected, '{}' was given", given);
      });
}
void Arguments::option(const std::string& name, const std::string& placeholder, double& value,
                       const std::string& description) {
  app_.add_option_function<std::string>(
          name, [&value](const std::string& given) { read_number(given, value); }, description)
      ->option_text(fmt::format("{} [{}]", placeholder, value))
      ->check([](const std::string& given) {
        double ignored = 0;
        return read_number(given, ignored) ? std::string()
                                           : fmt::format("a number was expected, '{}' was given", given);
      });
}
void Arguments::option(const std::string& name, const std::string& placeholder,
                       std::vector<std::string>& values, const std::string& description) {
  app_.add_option(name, values, description)->option_text(placeholder + " ...")->expected(1)->take_all();
}
void Arguments::flag(const std::string& name, bool& value, const std::string& description) {
  app_.add_flag(name, value, description);
}

int run_command_line(int argc, char** argv, const std::vector<Command>& commands,
                     const std::string& opening) {
  try {
    const Parsed parsed = parse(argc, argv, commands, opening);
    ProcessRanks ranks;
    run(parsed, ranks);
    flush_output();
    return kDone;
  } catch (const Error& error) {
    return report(error.what(), error.kind() == ErrorKind::kInput ? kBadInput : kRunFailed);
  } catch (const std::bad_alloc&) {
    return report("out of memory: choose a smaller micro-batch or sequence", kRunFailed);
  } catch (const std::filesystem::filesystem_error& error) {
    return report(fmt::format("cannot use '{}': {}", error.path1().string(), error.code().message()),
                  kRunFailed);
  } catch (const std::exception& error) {
    return report(error.what(), kRunFailed);
  }
}

}  // namespace agoq
