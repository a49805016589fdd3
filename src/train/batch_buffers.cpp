#include "train/batch_buffers.h"

#include <algorithm>

namespace agoq {
namespace {

template <typename T>
void upload_vector(const Context& context, const std::vector<T>& values, const Tensor& destination) {
  const std::size_t bytes = std::min(values.size() * sizeof(T), destination.bytes());
  context.backend.upload(context, values.data(), destination.data, bytes);
}

}  // namespace

HostBatch shape_only_batch(std::int64_t sequences, std::int64_t sequence) {
  HostBatch batch;
  const auto tokens = static_cast<std::size_t>(sequences * sequence);
  batch.tokens.resize(tokens);
  batch.targets.resize(tokens);
  batch.weights.assign(tokens, 1.0f);
  for (std::int64_t s = 0; s < sequences; ++s) {
    batch.document_starts.push_back(static_cast<std::int32_t>(s * sequence));
    for (std::int64_t i = 0; i < sequence; ++i) batch.positions.push_back(static_cast<std::int32_t>(i));
  }
  batch.document_starts.push_back(static_cast<std::int32_t>(tokens));
  batch.document_count = sequences;
  batch.longest_document = sequence;
  batch.valid_tokens = static_cast<std::int64_t>(tokens);
  return batch;
}

BatchBuffers::BatchBuffers(Arena& arena, std::int64_t tokens, std::int64_t sequence) {
  batch_.tokens = arena.take(ElementType::kInt32, Shape{tokens});
  batch_.targets = arena.take(ElementType::kInt32, Shape{tokens});
  batch_.weights = arena.take(ElementType::kFp32, Shape{tokens});
  batch_.positions = arena.take(ElementType::kInt32, Shape{tokens});
  batch_.documents.starts = arena.take(ElementType::kInt32, Shape{tokens + 1});
  // The bound, not the longest of each batch: workspaces are planned once.
  batch_.documents.longest = sequence;
}

Batch BatchBuffers::upload(const Context& context, const HostBatch& host) {
  check(static_cast<std::int64_t>(host.tokens.size()) == batch_.tokens.count(),
        "a micro-batch of {} tokens came where {} were planned", host.tokens.size(),
        batch_.tokens.count());
  upload_vector(context, host.tokens, batch_.tokens);
  upload_vector(context, host.targets, batch_.targets);
  upload_vector(context, host.weights, batch_.weights);
  upload_vector(context, host.positions, batch_.positions);
  upload_vector(context, host.document_starts, batch_.documents.starts);
  Batch batch = batch_;
  batch.documents.count = host.document_count;
  batch.documents.starts.shape = Shape{host.document_count + 1};
  return batch;
}

}  // namespace agoq
