// Embedding: out[n] = table[tokens[n]], and its gradient
//
//   dtable[t] += sum of dout[n] over the positions n with tokens[n] = t
//
// Backward sorts the positions by token (a counting sort in the workspace: V + N + min(N, V) int32),
// sums each token's rows in position order, and decodes, adds to and encodes that one row of the main
// gradient. Rows of tokens that are absent are not touched: decoding and encoding them again would round
// what they hold once more for nothing.
// Invariant: a row is the work of one thread and its sum has a fixed order, so the result does not
// depend on the number of threads.
#include <omp.h>

#include <algorithm>
#include <cstring>

#include "backend/cpu/row_codec.h"
#include "backend/cpu/storage.h"

namespace agoq::cpu::AGOQ_CPU_ISA {
namespace {

void check_tokens(std::string_view operation, const Tensor& tokens, std::int64_t vocabulary) {
  const std::int32_t* const token = tokens.as<std::int32_t>();
  for (std::int64_t n = 0; n < tokens.count(); ++n) {
    check_input(0 <= token[n] && token[n] < vocabulary,
                "{}: token ids are 0 to {}; position {} holds {}: the data was tokenised for another "
                "vocabulary, or model.vocabulary is too small",
                operation, vocabulary - 1, n, token[n]);
  }
}

// Positions grouped by token: those of token t are order[end[t - 1], end[t]), with end[-1] = 0.
struct TokenOrder {
  std::int32_t* end;      // [V]
  std::int32_t* order;    // [N]
  std::int32_t* present;  // [min(N, V)]: the tokens that occur, ascending
  std::int64_t present_count = 0;

  TokenOrder(Arena& workspace, std::int64_t positions, std::int64_t vocabulary)
      : end(workspace.take(ElementType::kInt32, Shape{vocabulary}).as<std::int32_t>()),
        order(workspace.take(ElementType::kInt32, Shape{positions}).as<std::int32_t>()),
        present(workspace.take(ElementType::kInt32, Shape{std::min(positions, vocabulary)})
                    .as<std::int32_t>()) {}

  void sort(const Tensor& tokens, std::int64_t vocabulary) {
    const std::int32_t* const token = tokens.as<std::int32_t>();
    std::fill_n(end, vocabulary, 0);
    for (std::int64_t n = 0; n < tokens.count(); ++n) ++end[token[n]];
    std::int32_t begin = 0;
    for (std::int64_t t = 0; t < vocabulary; ++t) {
      const std::int32_t occurrences = end[t];
      if (occurrences > 0) present[present_count++] = static_cast<std::int32_t>(t);
      end[t] = begin;  // the loop below moves it on to the end
      begin += occurrences;
    }
    for (std::int64_t n = 0; n < tokens.count(); ++n) {
      order[end[token[n]]++] = static_cast<std::int32_t>(n);
    }
  }

  std::int32_t begin_of(std::int32_t token) const { return token == 0 ? 0 : end[token - 1]; }
};

template <typename Source, typename T>
void add_row(const Source* __restrict source, std::int64_t count, T* __restrict sum) {
  for (std::int64_t i = 0; i < count; ++i) {
    if constexpr (std::is_same_v<Source, T>) {
      sum[i] += source[i];
    } else {
      sum[i] += to_float(source[i]);
    }
  }
}

// Source: the type of dout; T: the compute type.
template <typename Source, typename T>
void backward(const Context& context, const Tensor& tokens, const Tensor& dout,
              const QuantTensor& dtable, const RandomKey& key, const Tensor& counters) {
  const std::int64_t width = dtable.width();
  const int threads = omp_get_max_threads();
  const Arena::Scope scope(context.workspace);
  TokenOrder positions(context.workspace, tokens.count(), dtable.rows());
  const Tensor scratch = context.workspace.take(ElementTypeOf<T>::value, Shape{threads, 2, width});
  if (context.workspace.is_measuring()) return;

  check_tokens("embedding_backward", tokens, dtable.rows());
  positions.sort(tokens, dtable.rows());
  const Source* const gradient = dout.as<Source>();
  std::int64_t non_finite = 0;
  std::int64_t saturated = 0;
  std::int64_t flushed_blocks = 0;
// Frequent tokens have long sums: rows are handed out as threads come free.
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads) \
    reduction(+ : non_finite, saturated, flushed_blocks) if (dout.count() > kSerialElements)
  for (std::int64_t p = 0; p < positions.present_count; ++p) {
    const std::int32_t token = positions.present[p];
    T* const sum = scratch.as<T>() + omp_get_thread_num() * 2 * width;
    T* const main = sum + width;
    std::fill_n(sum, width, T{0});
    for (std::int32_t k = positions.begin_of(token); k < positions.end[token]; ++k) {
      add_row(gradient + positions.order[k] * width, width, sum);
    }
    QuantCounts counts;
    decode_row(dtable, token, main);
    add_row(sum, width, main);
    encode_row(dtable, token, main, key, counts);
    non_finite += counts.non_finite;
    saturated += counts.saturated;
    flushed_blocks += counts.flushed_blocks;
  }
  if (counters) {
    std::int64_t* const total = counters.as<std::int64_t>();
    total[static_cast<int>(QuantCounter::kNonFinite)] += non_finite;
    total[static_cast<int>(QuantCounter::kSaturated)] += saturated;
    total[static_cast<int>(QuantCounter::kFlushedBlocks)] += flushed_blocks;
  }
}

}  // namespace

void CpuBackend::embedding_forward(const Context& context, const Tensor& tokens, const Tensor& table,
                                   const Tensor& out) {
  check(tokens.type == ElementType::kInt32 && out.type == table.type && out.width() == table.width() &&
            out.rows() == tokens.count(),
        "embedding_forward: {} tokens of a {} table {} give an output of that type [{}, {}]; the output "
        "is {} {}",
        tokens.count(), name_of(table.type), table.shape.to_string(), tokens.count(), table.width(),
        name_of(out.type), out.shape.to_string());
  if (context.workspace.is_measuring()) return;
  check_tokens("embedding_forward", tokens, table.rows());
  const std::int32_t* const token = tokens.as<std::int32_t>();
  const auto row_bytes = static_cast<std::size_t>(table.width()) * size_of(table.type);
#pragma omp parallel for schedule(static) if (out.count() > kSerialElements)
  for (std::int64_t n = 0; n < tokens.count(); ++n) {
    std::memcpy(out.data + static_cast<std::size_t>(n) * row_bytes,
                table.data + static_cast<std::size_t>(token[n]) * row_bytes, row_bytes);
  }
}

void CpuBackend::embedding_backward(const Context& context, const Tensor& tokens, const Tensor& dout,
                                    const QuantTensor& dtable, const RandomKey& key,
                                    const Tensor& counters) {
  check(tokens.type == ElementType::kInt32 && dout.rows() == tokens.count() &&
            dout.width() == dtable.width(),
        "embedding_backward: {} int32 tokens and a table of width {} need dout [{}, {}]; tokens are {}, "
        "dout is {}",
        tokens.count(), dtable.width(), tokens.count(), dtable.width(), name_of(tokens.type),
        dout.shape.to_string());
  switch (dout.type) {
    case ElementType::kFp64:
      return backward<double, double>(context, tokens, dout, dtable, key, counters);
    case ElementType::kFp32: return backward<float, float>(context, tokens, dout, dtable, key, counters);
    case ElementType::kBf16: return backward<Bf16, float>(context, tokens, dout, dtable, key, counters);
    default: fail("embedding_backward: dout is bf16, fp32 or fp64; this one is {}", name_of(dout.type));
  }
}

}  // namespace agoq::cpu::AGOQ_CPU_ISA
