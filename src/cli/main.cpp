// agoq: the program. One line per command; each is a file of its own.
#include "cli/command.h"

int main(int argc, char** argv) {
  return agoq::run_command_line(
      argc, argv,
      {
          {"train", "Train what a configuration describes", agoq::declare_train},
          {"plan", "Print what a run will hold in memory, before it runs", agoq::declare_plan},
          {"eval", "Print a trained model's loss on text", agoq::declare_eval},
          {"generate", "Let a trained model write", agoq::declare_generate},
          {"report", "Print finished runs side by side", agoq::declare_report},
          {"formats", "Print every format's bits per element and measured error", agoq::declare_formats},
          {"info", "Print the program's version, its libraries and this machine", agoq::declare_info},
      },
      "agoq trains LLaMA-style models with about 4 bits per saved activation and 8 bits per main\n"
      "gradient.\n"
      "\n"
      "Start with\n"
      "  agoq plan examples/quickstart.toml       what a run will take, before it runs\n"
      "  agoq train examples/quickstart.toml      train, and write runs/quickstart/agoq\n"
      "  agoq generate runs/quickstart/agoq       let the trained model write");
}
