// agoq: the program. One line per command; each is a file of its own.
#include "cli/command.h"

int main(int argc, char** argv) {
  return agoq::run_command_line(
      argc, argv,
      {
          {"info", "Print the program's version, its libraries and this machine", agoq::declare_info},
      },
      "agoq trains LLaMA-style models with about 4 bits per saved activation and 8 bits per main\n"
      "gradient.\n"
      "\n"
      "Start with\n"
      "  agoq plan examples/quickstart.toml       what a run will take, before it runs\n"
      "  agoq train examples/quickstart.toml      train, and write runs/quickstart\n"
      "  agoq generate runs/quickstart            let the trained model write");
}
