// agoq: the program. One line per command; each is a file of its own.
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>

#include "cli/command.h"

namespace {

// Idle OpenMP threads spin for milliseconds by default, and where other programs share the processors
// every parallel loop then waits for a spinning thread's time slice to end (a training step took 8 times
// as long beside one busy neighbour). Not to spin at all costs a tenth of the speed on an idle machine,
// so they spin for some microseconds. libgomp reads its settings when it is loaded, before main: the
// program starts itself once more with them set. A policy from outside is left alone.
void let_idle_threads_sleep(char** argv) {
  if (std::getenv("OMP_WAIT_POLICY") != nullptr || std::getenv("GOMP_SPINCOUNT") != nullptr) return;
  setenv("OMP_WAIT_POLICY", "passive", 0);
  setenv("GOMP_SPINCOUNT", "30000", 0);
  // By its own name, which ps, top and pgrep show, and where that names no file any more by the link.
  char program[4096];
  const ssize_t length = readlink("/proc/self/exe", program, sizeof(program) - 1);
  if (length > 0) {
    program[length] = '\0';
    execv(program, argv);
  }
  execv("/proc/self/exe", argv);  // returns only where there is no /proc: then they spin
}

// A file that the program opens would otherwise get the number of a stream that it was started without
// (`agoq train run.toml >&-`), and what is printed would end up in that file. Opened the wrong way
// round, so that reading and writing still fail.
void occupy_closed_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(stream, F_GETFD) != -1) continue;
    // The lowest free number, which is this one.
    if (open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY) != stream) _exit(1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  occupy_closed_streams();
  let_idle_threads_sleep(argv);
  return agoq::run_command_line(
      argc, argv,
      {
          {"train", "Train what a configuration describes", agoq::declare_train,
           agoq::Processes::kSeveral},
          {"plan", "Print what a run will hold in memory, before it runs", agoq::declare_plan},
          {"eval", "Print a trained model's loss on text", agoq::declare_eval},
          {"generate", "Let a trained model write", agoq::declare_generate},
          {"report", "Print finished runs side by side", agoq::declare_report},
          {"formats", "Print every format's bits per element and measured error", agoq::declare_formats},
          {"fidelity", "Measure what stored activations lose on a trained model",
           agoq::declare_fidelity},
          {"bench", "Measure the speed of the engine's operations", agoq::declare_bench,
           agoq::Processes::kSeveral},
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
