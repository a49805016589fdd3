#include "train/inference.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "train/run_directory.h"

namespace agoq {
namespace {

/// An index drawn with probability proportional to exp(logit / temperature).
std::int32_t sample(const std::vector<float>& logits, double temperature, double uniform) {
  const auto best = std::max_element(logits.begin(), logits.end());
  if (temperature == 0) return static_cast<std::int32_t>(best - logits.begin());
  const auto weight = [&](float logit) {
    return std::exp((static_cast<double>(logit) - *best) / temperature);
  };
  double total = 0;
  for (const float logit : logits) total += weight(logit);
  double left = uniform * total;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    left -= weight(logits[i]);
    if (left < 0) return static_cast<std::int32_t>(i);
  }
  return static_cast<std::int32_t>(logits.size() - 1);
}

}  // namespace

Inference::Parts::Parts(const RunConfig& config, Backend& backend, RunArenas& arenas,
                        std::int64_t sequences)
    : model({backend, {}, arenas[MemoryClass::kWorkspace], {}}, config.model,
            arenas[MemoryClass::kWeights], arenas[MemoryClass::kTables], config.run.sequence),
      store(arenas[MemoryClass::kBatch], transformer_saves(config.model),
            make_forward_only_plan(transformer_saves(config.model)), sequences * config.run.sequence, 1),
      buffers(arenas[MemoryClass::kBatch], sequences * config.run.sequence, config.run.sequence) {
  Arena& batch = arenas[MemoryClass::kBatch];
  const ElementType compute = statistics_type(config.model.dtype);
  token_loss = batch.take(compute, Shape{sequences * config.run.sequence});
  total = batch.take(ElementType::kFp64, Shape{1});
  logits = batch.take(compute, Shape{1, config.model.vocabulary});
}

BytesPerClass Inference::measure(const RunConfig& config, Backend& backend, std::int64_t sequences) {
  backend.set_deterministic(config.run.deterministic);
  RunArenas arenas = RunArenas::measuring();
  Parts parts(config, backend, arenas, sequences);
  const Context context{backend, {}, arenas[MemoryClass::kWorkspace], {}};
  const Batch batch = parts.buffers.upload(context, shape_only_batch(sequences, config.run.sequence));
  parts.model.evaluate(context, batch, parts.store, parts.token_loss);
  backend.sum(context, parts.token_loss, parts.total);
  parts.model.logits(context, batch, parts.store, 0, 1, parts.logits);
  return arenas.high_water();
}

Inference::Inference(const RunConfig& config, Backend& backend, std::int64_t sequences)
    : config_(config),
      backend_(backend),
      arenas_(backend.allocator(), measure(config, backend, sequences)),
      context_{backend, {}, arenas_[MemoryClass::kWorkspace], {}},
      parts_(config_, backend, arenas_, sequences) {}

std::unique_ptr<Inference> Inference::load(const std::string& directory, Backend& backend,
                                           std::int64_t sequences) {
  const RunDirectory run(directory, RunStart::kResume);
  std::unique_ptr<Inference> inference(new Inference(run.config(), backend, sequences));
  run.load_latest_weights(inference->context_, inference->config_, inference->parts_.model,
                          print_notice);
  return inference;
}

double Inference::evaluate(const HostBatch& host) {
  const Batch batch = parts_.buffers.upload(context_, host);
  parts_.model.evaluate(context_, batch, parts_.store, parts_.token_loss);
  backend_.sum(context_, parts_.token_loss, parts_.total);
  double sum = 0;
  backend_.read(context_, parts_.total.data, &sum, sizeof(sum));
  return sum;
}

void Inference::next_token_logits(const HostBatch& host, std::int64_t length,
                                  std::vector<float>& logits) {
  const Batch batch = parts_.buffers.upload(context_, host);
  parts_.model.logits(context_, batch, parts_.store, length - 1, length, parts_.logits);
  logits.resize(static_cast<std::size_t>(parts_.logits.count()));
  check(parts_.logits.type == ElementType::kFp32, "text is generated from fp32 or bf16 models, not {}",
        name_of(config_.model.dtype));
  backend_.read(context_, parts_.logits.data, logits.data(), parts_.logits.bytes());
  check(std::all_of(logits.begin(), logits.end(), [](float logit) { return std::isfinite(logit); }),
        "the model's logits are not finite, so its weights hold NaN or infinity: go back to an earlier "
        "checkpoint");
}

void generate(Inference& inference, const Generation& generation,
              const std::function<void(char byte)>& emit) {
  check_input(generation.temperature >= 0, "--temperature must not be negative; {} was given",
              generation.temperature);
  const std::int64_t sequence = inference.config().run.sequence;
  HostBatch batch = shape_only_batch(1, sequence);
  // A document begins after the end of another: an empty prompt starts there.
  std::vector<std::int32_t> text{kDocumentBorder};
  for (const char byte : generation.prompt) text.push_back(static_cast<unsigned char>(byte));
  RandomKey key;
  key.seed = generation.seed;
  key = key.with(RandomPurpose::kSampling, 0);
  std::vector<float> logits;
  for (std::int64_t t = 0; t < generation.tokens; ++t) {
    const std::int64_t length = std::min(static_cast<std::int64_t>(text.size()), sequence);
    std::copy(text.end() - length, text.end(), batch.tokens.begin());
    inference.next_token_logits(batch, length, logits);
    const std::int32_t token =
        sample(logits, generation.temperature, random_uniform(key, static_cast<std::uint64_t>(t)));
    if (token >= kDocumentBorder) return;
    emit(static_cast<char>(token));
    text.push_back(token);
  }
}

}  // namespace agoq
