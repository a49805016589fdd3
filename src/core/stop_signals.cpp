#include "core/stop_signals.h"

namespace agoq {
namespace {

// What a handler writes has to be global.
volatile std::sig_atomic_t requested = 0;
int living = 0;

}  // namespace

StopSignals::StopSignals() {
  if (living++ == 0) requested = 0;
  struct sigaction action {};
  action.sa_handler = [](int) { requested = 1; };
  sigaction(SIGTERM, &action, &old_term_);
  sigaction(SIGINT, &action, &old_int_);
  // mpirun passes it on to its ranks, and does nothing else: with SIGTERM and SIGINT it kills them soon.
  sigaction(SIGUSR1, &action, &old_usr1_);
  sigaction(SIGHUP, nullptr, &old_hup_);
  // nohup has it ignored: then the run is meant to outlive its terminal.
  if (old_hup_.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);
}

StopSignals::~StopSignals() {
  sigaction(SIGTERM, &old_term_, nullptr);
  sigaction(SIGINT, &old_int_, nullptr);
  sigaction(SIGUSR1, &old_usr1_, nullptr);
  sigaction(SIGHUP, &old_hup_, nullptr);
  --living;
}

bool StopSignals::any() { return requested != 0; }

}  // namespace agoq
