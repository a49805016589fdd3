// A step that is not finite, on as many ranks as this program was started with.
#include <gtest/gtest.h>

#include <chrono>
#include <limits>
#include <thread>

#include "backend/profiled_backend.h"
#include "core/temporary_folder.h"
#include "data/dataset.h"
#include "ranks/rank_run.h"
#include "train/nonfinite_steps.h"

namespace agoq {
namespace {

/// Plants NaN in what attention gives on rank 0, and lets the last rank take its time when told to.
class Planting : public ProfiledBackend {
 public:
  using ProfiledBackend::ProfiledBackend;

  void attention_forward(const Context& context, const AttentionShape& shape, const Tensor& qkv,
                         const Documents& documents, const Tensor& out,
                         const Tensor& log_sum_exp) override {
    ProfiledBackend::attention_forward(context, shape, qkv, documents, out, log_sum_exp);
    if (ranks().rank() == 0) {
      const float not_a_number = std::numeric_limits<float>::quiet_NaN();
      upload(context, &not_a_number, out.data, sizeof not_a_number);
    }
    if (ranks().rank() == ranks().size() - 1) std::this_thread::sleep_for(pause);
    pause = {};
  }

  std::chrono::seconds pause{0};
};

// The micro-batches of a rank go forward once more, traced, until the first that is not finite: that
// may take one rank much longer than another, and longer than an exchange may.
TEST(NonFinite, ARankThatLooksForLongerIsWaitedFor) {
  if (ranks().size() == 1) GTEST_SKIP() << "one rank waits for nobody";
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 3000; ++i) text += fmt::format("{} squared is {}. ", i, i * i);
  for (int d = 0; d < 20; ++d) folder.write(fmt::format("{}.txt", d), text.substr(97 * d, 900));
  RunConfig config = fp32_config();
  config.parallel.ranks = ranks().size();
  config.run.device = rank_device();
  config.run.deterministic = true;
  config.run.micro_batches = ranks().size();
  config.run.nonfinite = NonFiniteAction::kSkip;
  config.data.paths = {folder.path("")};
  config.data.extensions = {".txt"};
  const Dataset data = Dataset::load(config.data);

  Planting backend(rank_backend());
  RunArenas arenas(backend.allocator(), plan_run(config, backend, 0, false).classes);
  Trainer trainer(config, backend, arenas, ranks());
  trainer.initialise();
  NonFiniteSteps steps(config, trainer, data);
  HostBatch batch;
  trainer.begin_step();
  data.fill(Split::kTraining, config.data.seed, ranks().rank(), 1, config.run.sequence, batch);
  trainer.micro_batch(batch);
  const double before = ranks().set_timeout(2);
  backend.pause = std::chrono::seconds(3);
  EXPECT_FALSE(steps.finish_step(0, batch).has_value());
  ranks().set_timeout(before);
  EXPECT_NE(steps.note().find("in micro-batch 1 on rank 0"), std::string::npos) << steps.note();
}

}  // namespace
}  // namespace agoq
