// attention against a plain loop in double precision, against finite differences, and against itself on
// each document by itself.
#include <cmath>

#include "backend/operation_testing.h"

namespace agoq {
namespace {

using namespace testing_operations;

constexpr auto kFp64 = ElementType::kFp64, kFp32 = ElementType::kFp32, kBf16 = ElementType::kBf16;

struct Attention {
  AttentionShape shape;
  std::vector<std::int32_t> lengths;
  std::int64_t tokens() const {
    std::int64_t total = 0;
    for (const std::int32_t length : lengths) total += length;
    return total;
  }
};

// The definition, with the whole row of scores.
void plain_attention(const Attention& attention, const Values& qkv, Values& out, Values& log_sum_exp) {
  // clang captures no structured binding under OpenMP.
  const int heads = attention.shape.heads, kv_heads = attention.shape.kv_heads;
  const int size = attention.shape.head_size;
  const std::int64_t width = attention.shape.qkv_width();
  out.assign(static_cast<std::size_t>(attention.tokens() * heads * size), 0.0);
  log_sum_exp.assign(static_cast<std::size_t>(attention.tokens() * heads), 0.0);
  std::int64_t start = 0;
  for (const std::int32_t length : attention.lengths) {
    for (int head = 0; head < heads; ++head) {
      const int kv_head = head / (heads / kv_heads);
      const auto at = [&](std::int64_t token, int section, int i) {
        return qkv[static_cast<std::size_t>((start + token) * width + section * size + i)];
      };
      for (std::int64_t query = 0; query < length; ++query) {
        Values p;
        double total = 0;
        for (std::int64_t key = 0; key <= query; ++key) {
          double score = 0;
          for (int i = 0; i < size; ++i) score += at(query, head, i) * at(key, heads + kv_head, i);
          p.push_back(std::exp(score / std::sqrt(size)));
          total += p.back();
        }
        for (std::int64_t key = 0; key <= query; ++key) {
          for (int i = 0; i < size; ++i) {
            out[static_cast<std::size_t>((start + query) * heads * size + head * size + i)] +=
                p[static_cast<std::size_t>(key)] / total * at(key, heads + kv_heads + kv_head, i);
          }
        }
        log_sum_exp[static_cast<std::size_t>((start + query) * heads + head)] = std::log(total);
      }
    }
    start += length;
  }
}

struct Result {
  Values out, log_sum_exp, dqkv;
};

Result run(Backend& backend, ElementType type, const Attention& attention, const Values& qkv,
           const Values& dout) {
  Bench bench(backend);
  const std::int64_t tokens = attention.tokens();
  const Documents documents = bench.documents(attention.lengths);
  const Tensor qkv_tensor = bench.of(type, Shape{tokens, attention.shape.qkv_width()}, qkv);
  const Tensor out = bench.empty(type, Shape{tokens, attention.shape.output_width()});
  const Tensor lse = bench.empty(statistics_type(type), Shape{tokens, attention.shape.heads});
  const Tensor dqkv = bench.empty(type, Shape{tokens, attention.shape.qkv_width()});
  backend.attention_forward(bench.context, attention.shape, qkv_tensor, documents, out, lse);
  backend.attention_backward(bench.context, attention.shape,
                             bench.of(type, Shape{tokens, attention.shape.output_width()}, dout),
                             qkv_tensor, out, lse, documents, dqkv);
  EXPECT_EQ(bench.workspace().used(), 0u);
  return {Bench::get(out), Bench::get(lse), Bench::get(dqkv)};
}

// Odd head sizes, kv heads < heads, one token, tile borders and their neighbours, many short documents.
std::vector<Attention> cases() {
  std::vector<std::int32_t> short_documents;
  for (std::int32_t i = 0; i < 60; ++i) short_documents.push_back(1 + i * 7 % 19);
  return {{{1, 1, 1}, {1}},           {{2, 1, 5}, {1}},
          {{4, 2, 8}, {63, 64, 65}},  {{3, 3, 7}, {17, 0, 130}},
          {{6, 2, 17}, {16, 15, 33}}, {{4, 2, 64}, {256, 256}},
          {{4, 1, 33}, {200}},        {{2, 2, 16}, short_documents}};
}

TEST(Attention, EqualsTheDefinition) {
  for (const Build& build : builds()) {
    for (const Attention& attention : cases()) {
      SCOPED_TRACE(build.name + " head size " + std::to_string(attention.shape.head_size));
      const Values qkv = normal(attention.tokens() * attention.shape.qkv_width(), 1);
      const Values dout = normal(attention.tokens() * attention.shape.output_width(), 2);
      Values out, lse;
      plain_attention(attention, qkv, out, lse);
      const Result exact = run(*build.backend, kFp64, attention, qkv, dout);
      EXPECT_LE(relative_error(exact.out, out), 1e-13);
      EXPECT_LE(relative_error(exact.log_sum_exp, lse), 1e-13);
      // FP32 rounding over the sums; BF16 results carry 2^-9 / sqrt(3) each, and delta uses rounded
      // outputs.
      const Result single = run(*build.backend, kFp32, attention, qkv, dout);
      EXPECT_LE(relative_error(single.out, exact.out), 1e-6);
      EXPECT_LE(relative_error(single.log_sum_exp, exact.log_sum_exp), 1e-6);
      EXPECT_LE(relative_error(single.dqkv, exact.dqkv), 2e-6);
      const Result brain = run(*build.backend, kBf16, attention, qkv, dout);
      EXPECT_LE(relative_error(brain.out, exact.out), 2.5e-3);
      EXPECT_LE(relative_error(brain.log_sum_exp, exact.log_sum_exp), 1e-6);
      EXPECT_LE(relative_error(brain.dqkv, exact.dqkv), 4e-3);
    }
  }
}

TEST(Attention, BackwardEqualsFiniteDifferences) {
  for (const Attention& attention :
       std::vector<Attention>{{{4, 2, 5}, {9, 1, 4}}, {{3, 1, 3}, {67, 2}}, {{2, 2, 9}, {13}}}) {
    Bench bench;
    Backend& backend = bench.context.backend;
    const std::int64_t tokens = attention.tokens();
    const Documents documents = bench.documents(attention.lengths);
    const Tensor qkv = bench.of(kFp64, Shape{tokens, attention.shape.qkv_width()},
                                normal(tokens * attention.shape.qkv_width(), 1));
    const Tensor out = bench.empty(kFp64, Shape{tokens, attention.shape.output_width()});
    const Tensor lse = bench.empty(kFp64, Shape{tokens, attention.shape.heads});
    const Tensor dqkv = bench.empty(kFp64, qkv.shape);
    const Values dout = normal(out.count(), 2);
    const auto loss = [&] {
      backend.attention_forward(bench.context, attention.shape, qkv, documents, out, lse);
      return dot(Bench::get(out), dout);
    };
    loss();
    backend.attention_backward(bench.context, attention.shape, bench.of(kFp64, out.shape, dout), qkv,
                               out, lse, documents, dqkv);
    const Values expected = finite_differences(qkv, loss);
    // Queries, keys and values each: a wrong factor in one must not hide behind the others.
    const std::int64_t width = attention.shape.qkv_width();
    const int edges[] = {0, attention.shape.heads, attention.shape.heads + attention.shape.kv_heads,
                         attention.shape.heads + 2 * attention.shape.kv_heads};
    for (int part = 0; part < 3; ++part) {
      Values mine, difference;
      for (std::int64_t token = 0; token < tokens; ++token) {
        for (std::int64_t i = edges[part] * attention.shape.head_size;
             i < edges[part + 1] * attention.shape.head_size; ++i) {
          mine.push_back(dqkv.as<double>()[token * width + i]);
          difference.push_back(expected[static_cast<std::size_t>(token * width + i)]);
        }
      }
      EXPECT_LE(relative_error(mine, difference), 1e-6) << "part " << part;
    }
  }
}

TEST(Attention, DocumentsDoNotSeeEachOther) {
  const AttentionShape shape{4, 2, 24};
  const std::vector<std::int32_t> lengths{100, 1, 64, 37, 129};
  const Attention together{shape, lengths};
  const Values qkv = normal(together.tokens() * shape.qkv_width(), 1);
  const Values dout = normal(together.tokens() * shape.output_width(), 2);
  for (const ElementType type : {kFp64, kFp32, kBf16}) {
    const Result all = run(cpu_backend(), type, together, qkv, dout);
    std::int64_t start = 0;
    for (const std::int32_t length : lengths) {
      const auto part = [&](const Values& values, std::int64_t width) {
        return Values(values.begin() + start * width, values.begin() + (start + length) * width);
      };
      const Result alone = run(cpu_backend(), type, {shape, {length}}, part(qkv, shape.qkv_width()),
                               part(dout, shape.output_width()));
      EXPECT_EQ(alone.out, part(all.out, shape.output_width()));
      EXPECT_EQ(alone.log_sum_exp, part(all.log_sum_exp, shape.heads));
      EXPECT_EQ(alone.dqkv, part(all.dqkv, shape.qkv_width()));
      start += length;
    }
  }
}

TEST(Attention, TakesLongSequencesOfAnyLength) {
  for (const std::int32_t length : {1000, 1025}) {
    const Attention attention{{2, 1, 16}, {length}};
    const Values qkv = normal(attention.tokens() * attention.shape.qkv_width(), 1);
    const Values dout = normal(attention.tokens() * attention.shape.output_width(), 2);
    Values out, lse;
    plain_attention(attention, qkv, out, lse);
    const Result single = run(cpu_backend(), kFp32, attention, qkv, dout);
    EXPECT_LE(relative_error(single.out, out), 1e-6);
    EXPECT_LE(relative_error(single.log_sum_exp, lse), 1e-6);
  }
}

TEST(Attention, StaysFiniteWhereExponentialsWouldOverflow) {
  const Attention attention{{1, 1, 8}, {70}};
  const Values qkv = normal(attention.tokens() * attention.shape.qkv_width(), 1, 60.0);
  const Values dout = normal(attention.tokens() * attention.shape.output_width(), 2);
  const Result exact = run(cpu_backend(), kFp64, attention, qkv, dout);
  const Result single = run(cpu_backend(), kFp32, attention, qkv, dout);
  EXPECT_LE(relative_error(single.out, exact.out), 1e-3);  // scores near 10^4 have an FP32 step of 10^-3
}

TEST(Attention, RefusesDocumentsThatDoNotCoverTheTokens) {
  Bench bench;
  const AttentionShape shape{2, 1, 4};
  const Tensor qkv = bench.of(kFp32, Shape{6, 16}, normal(96, 1));
  const Tensor out = bench.empty(kFp32, Shape{6, 8}), lse = bench.empty(kFp32, Shape{6, 2});
  const auto forward = [&](const Documents& documents, const AttentionShape& heads) {
    bench.context.backend.attention_forward(bench.context, heads, qkv, documents, out, lse);
  };
  EXPECT_NO_THROW(forward(bench.documents({2, 4}), shape));
  EXPECT_THROW(forward(bench.documents({2, 3}), shape), Error);
  EXPECT_THROW(forward({bench.integers({0, 4, 2, 6}), 3, 6}, shape), Error);
  EXPECT_THROW(forward({bench.integers({0, 6}), 1, 5}, shape), Error);
  EXPECT_THROW(forward(bench.documents({6}), {3, 2, 4}), Error);
}

}  // namespace
}  // namespace agoq
