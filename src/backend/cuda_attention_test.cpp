// attention on the GPU: the plain kernels against the CPU, cuDNN against the plain kernels.
#include <string>

#include "backend/cuda_testing.h"

namespace agoq {
namespace {

using namespace testing_cuda;

constexpr auto kFp32 = ElementType::kFp32, kBf16 = ElementType::kBf16;

struct Attention {
  AttentionShape shape;
  std::vector<std::int32_t> lengths;
  std::int64_t tokens() const {
    std::int64_t total = 0;
    for (const std::int32_t length : lengths) total += length;
    return total;
  }
  std::string name() const {
    return std::to_string(shape.heads) + "/" + std::to_string(shape.kv_heads) + " heads of " +
           std::to_string(shape.head_size) + ", " + std::to_string(lengths.size()) +
           " documents, the first of " + std::to_string(lengths.front());
  }
};

/// Plain attention during its life.
class Plain {
 public:
  Plain() { cuda_backend().set_deterministic(true); }
  ~Plain() { cuda_backend().set_deterministic(false); }
};

/// The tensors of one case, and what both backends make of them.
struct BothRuns {
  /// `drawn`: on the GPU.
  BothRuns(Pair& pair, const Attention& attention, ElementType type, bool drawn = false)
      : shape(attention.shape),
        qkv(normal(pair, type, Shape{attention.tokens(), shape.qkv_width()}, drawn)),
        dout(normal(pair, type, Shape{attention.tokens(), shape.output_width()}, drawn)),
        out(pair.empty(type, Shape{attention.tokens(), shape.output_width()})),
        log_sum_exp(pair.empty(kFp32, Shape{attention.tokens(), shape.heads})),
        dqkv(pair.empty(type, Shape{attention.tokens(), shape.qkv_width()})) {
    std::vector<std::int32_t> at{0};
    for (const std::int32_t length : attention.lengths) {
      at.push_back(at.back() + length);
      documents.longest = std::max<std::int64_t>(documents.longest, length);
    }
    documents.count = static_cast<std::int64_t>(attention.lengths.size());
    starts = pair.integers(at);
  }
  static Twin normal(Pair& pair, ElementType type, Shape size, bool drawn) {
    return drawn ? pair.drawn(type, size) : pair.random(type, size);
  }
  Documents documents_at(const Tensor& memory) const {
    Documents placed = documents;
    placed.starts = memory;
    return placed;
  }
  void on_cpu(Pair& pair) const {
    const Documents at = documents_at(starts.cpu);
    cpu_backend().attention_forward(pair.cpu, shape, qkv.cpu, at, out.cpu, log_sum_exp.cpu);
    cpu_backend().attention_backward(pair.cpu, shape, dout.cpu, qkv.cpu, out.cpu, log_sum_exp.cpu, at,
                                     dqkv.cpu);
  }
  void on_cuda(Pair& pair) const {
    const Documents at = documents_at(starts.cuda);
    cuda_backend().attention_forward(pair.cuda, shape, qkv.cuda, at, out.cuda, log_sum_exp.cuda);
    cuda_backend().attention_backward(pair.cuda, shape, dout.cuda, qkv.cuda, out.cuda, log_sum_exp.cuda,
                                      at, dqkv.cuda);
  }

  AttentionShape shape;
  Twin qkv, dout, out, log_sum_exp, dqkv, starts;
  Documents documents;
};

// One token, tile borders and their neighbours, documents that share tiles, empty ones, every tiling.
std::vector<Attention> cases() {
  std::vector<std::int32_t> short_documents;
  for (std::int32_t i = 0; i < 60; ++i) short_documents.push_back(1 + i * 7 % 19);
  std::vector<Attention> all{{{2, 1, 8}, {1}},           {{4, 2, 96}, {63, 64, 65}},
                             {{3, 3, 72}, {17, 0, 130}}, {{4, 1, 200}, {100, 33}},
                             {{4, 2, 256}, {129, 64}},   {{2, 2, 16}, short_documents}};
  for (const int size : {64, 128}) {
    for (const std::int32_t length : {1, 7, 128, 1000, 1025}) all.push_back({{4, 1, size}, {length}});
    all.push_back({{4, 1, size}, {5, 0, 300, 64, 1, 127}});
    all.push_back({{8, 2, size}, {256, 256, 256}});
  }
  return all;
}

TEST(CudaAttention, PlainKernelsAgreeWithTheCpu) {
  AGOQ_NEEDS_GPU();
  const Plain plain;
  for (const Attention& attention : cases()) {
    for (const ElementType type : {kFp32, kBf16}) {
      SCOPED_TRACE(attention.name() + " " + std::string(name_of(type)));
      Pair pair;
      const BothRuns run(pair, attention, type);
      run.on_cpu(pair);
      run.on_cuda(pair);
      // BF16: the tensor cores take weights and their gradients rounded to BF16, 2^-9 / sqrt(3) = 0.0011
      // relative each, as results are on both sides; the CPU keeps FP32 in between.
      const double tolerance = type == kFp32 ? 1e-5 : 1e-2;
      EXPECT_LE(pair.error(run.out), tolerance);
      EXPECT_LE(pair.error(run.log_sum_exp), 1e-5);
      EXPECT_LE(pair.error(run.dqkv), tolerance);
      EXPECT_EQ(pair.cuda.workspace.used(), 0u);
    }
  }
}

using Lengths = std::vector<std::int32_t>;
class PlainAttention : public testing::TestWithParam<std::tuple<ElementType, Lengths>> {};
TEST_P(PlainAttention, GivesTheSameBitsInEveryRun) {
  AGOQ_NEEDS_GPU();
  const Plain plain;
  const auto& [type, lengths] = GetParam();
  Pair pair;
  const BothRuns run(pair, {{8, 2, 128}, lengths}, type);
  run.on_cuda(pair);
  const Values out = pair.values(run.out.cuda), gradient = pair.values(run.dqkv.cuda);
  for (int again = 0; again < 3; ++again) {
    run.on_cuda(pair);
    EXPECT_EQ(pair.values(run.out.cuda), out);
    EXPECT_EQ(pair.values(run.dqkv.cuda), gradient);
  }
}
// Many tiles, whose blocks finish in an order of their own; and few, as long as compute-sanitizer takes.
INSTANTIATE_TEST_SUITE_P(Cuda, PlainAttention,
                         testing::Combine(testing::Values(kFp32, kBf16),
                                          testing::Values(Lengths{700, 1, 1300}, Lengths{70, 1, 66})),
                         [](const auto& test) {
                           return fmt::format("{}_of_{}", name_of(std::get<0>(test.param)),
                                              std::get<1>(test.param).back());
                         });

struct Results {
  Values out, log_sum_exp, gradient;
};

Results results(Pair& pair, const BothRuns& run) {
  return {pair.values(run.out.cuda), pair.values(run.log_sum_exp.cuda), pair.values(run.dqkv.cuda)};
}

Results results_of_plain_kernels(Pair& pair, const BothRuns& run) {
  const Plain plain;
  run.on_cuda(pair);
  return results(pair, run);
}

/// Computes again over what the CPU has there, which is not the results; what that says on stderr.
std::string run_again(Pair& pair, const BothRuns& run) {
  pair.upload(run.out);
  pair.upload(run.dqkv);
  testing::internal::CaptureStderr();
  run.on_cuda(pair);
  return testing::internal::GetCapturedStderr();
}

/// Columns [first, first + count) of the rows from `row` on.
Values part_of(const Values& values, std::int64_t width, std::int64_t row, std::int64_t first,
               std::int64_t count) {
  Values part;
  for (auto at = static_cast<std::size_t>(row * width); at < values.size(); at += width) {
    const auto begin = values.begin() + static_cast<std::ptrdiff_t>(at) + first;
    part.insert(part.end(), begin, begin + count);
  }
  return part;
}

/// Of the tokens from `first_token` on; queries, keys and values each by themselves. BF16: both round
/// weights, their gradients and results, each time 2^-9 / sqrt(3) = 0.0011 relative.
void expect_near(const Results& cudnn, const Results& plain, const AttentionShape& shape,
                 std::int64_t first_token = 0) {
  SCOPED_TRACE(fmt::format("tokens from {}", first_token));
  const auto expect_part = [&](const char* name, const Values& a, const Values& b, std::int64_t width,
                               std::int64_t first, std::int64_t count, double tolerance) {
    EXPECT_LE(relative_error(part_of(a, width, first_token, first, count),
                             part_of(b, width, first_token, first, count)),
              tolerance)
        << name;
  };
  const std::int64_t query = shape.output_width(), key = std::int64_t{shape.kv_heads} * shape.head_size;
  const std::int64_t width = shape.qkv_width();
  expect_part("out", cudnn.out, plain.out, query, 0, query, 1e-2);
  expect_part("log_sum_exp", cudnn.log_sum_exp, plain.log_sum_exp, shape.heads, 0, shape.heads, 1e-4);
  expect_part("dq", cudnn.gradient, plain.gradient, width, 0, query, 1e-2);
  expect_part("dk", cudnn.gradient, plain.gradient, width, query, key, 1e-2);
  expect_part("dv", cudnn.gradient, plain.gradient, width, query + key, key, 1e-2);
}

/// Whether cuDNN is asked: only then does a forward pass take workspace.
bool has_cudnn(const BothRuns& run) {
  Arena measured = Arena::measuring("attention");
  const Context plan{cuda_backend(), {}, measured, {}};
  cuda_backend().attention_forward(plan, run.shape, run.qkv.cuda, run.documents_at(run.starts.cuda),
                                   run.out.cuda, run.log_sum_exp.cuda);
  return measured.high_water() > 0;
}

// Equal lengths are a batch, others are ragged; a line on stderr would say that plain kernels served.
TEST(CudaAttention, CudnnAgreesWithThePlainKernels) {
  AGOQ_NEEDS_GPU();
  bool first = true;
  for (const AttentionShape& shape : {AttentionShape{8, 2, 64}, AttentionShape{8, 2, 128},
                                      AttentionShape{4, 4, 128}, AttentionShape{9, 3, 64}}) {
    for (const std::vector<std::int32_t>& lengths : {std::vector<std::int32_t>{128},
                                                     {1000},
                                                     {1025},
                                                     {1024, 1024, 1024},
                                                     {700, 1, 324, 23, 500},
                                                     {7, 0, 90},
                                                     {2048, 511}}) {
      const Attention attention{shape, lengths};
      SCOPED_TRACE(attention.name());
      Pair pair(std::size_t{512} << 20);
      const BothRuns run(pair, attention, kBf16);
      const Results plain = results_of_plain_kernels(pair, run);
      const std::string said = run_again(pair, run);
      if (first && said.find("does not serve") == std::string::npos && !said.empty()) {
        GTEST_SKIP() << said;
      }
      first = false;
      EXPECT_EQ(said, "");
      expect_near(results(pair, run), plain, shape);
    }
  }
}

// 131,072 tokens, as one document and as several. An output is a mean over up to as many values and some
// 200 times smaller than they are; but addends and mean are rounded relative to themselves, so that
// tolerances stay. FP32 sums of so many terms lose up to 5e-4 where tensor cores cut them off, 8,192
// times. The last tokens have the most keys and weigh least in a norm over all: they are looked at by
// themselves.
class LongAttention : public testing::TestWithParam<Attention> {};
TEST_P(LongAttention, CudnnAgreesWithThePlainKernels) {
  AGOQ_NEEDS_GPU();
  const Attention& attention = GetParam();
  Pair pair(std::size_t{1} << 30);
  const BothRuns run(pair, attention, kBf16, /*drawn=*/true);
  if (!has_cudnn(run)) GTEST_SKIP() << "cuDNN is not there";
  const Results plain = results_of_plain_kernels(pair, run);
  EXPECT_EQ(run_again(pair, run), "") << "plain kernels served";
  const Results cudnn = results(pair, run);
  expect_near(cudnn, plain, attention.shape);
  expect_near(cudnn, plain, attention.shape, attention.tokens() - 1024);
}
INSTANTIATE_TEST_SUITE_P(Cuda, LongAttention,
                         testing::Values(Attention{{1, 1, 128}, {131072}},
                                         Attention{{2, 1, 128}, {40000, 1, 65536, 129, 0, 17407, 7999}}),
                         [](const auto& test) {
                           return test.param.lengths.size() == 1 ? "OneDocument" : "Packed";
                         });

// Shapes that cuDNN refuses, as they come up: plain kernels compute them, and a line says so, once a
// shape. Each run of the test takes another one, for --gtest_repeat.
class CudnnRefuses : public testing::Test {
 protected:
  static int next() {
    static int runs = 0;
    return runs++;
  }
};

// Backward attention of one token has no graph.
TEST_F(CudnnRefuses, DocumentsOfOneToken) {
  AGOQ_NEEDS_GPU();
  Pair pair;
  const Attention attention{{4, 2, 64}, Lengths(static_cast<std::size_t>(5 + next()), 1)};
  const BothRuns run(pair, attention, kBf16);
  if (!has_cudnn(run)) GTEST_SKIP() << "cuDNN is not there";
  const Results plain = results_of_plain_kernels(pair, run);
  const std::string said = run_again(pair, run);
  EXPECT_NE(said.find("cuDNN does not serve attention backward"), std::string::npos) << said;
  const Results served = results(pair, run);
  EXPECT_LE(relative_error(served.out, plain.out), 1e-2);
  EXPECT_LE(relative_error(served.log_sum_exp, plain.log_sum_exp), 1e-4);
  // One token attends to itself only: all of the gradient is that of its value.
  EXPECT_LE(relative_error(served.gradient, plain.gradient), 1e-2);
}

// The offsets of 140,000 documents take 9 MiB, of 4 MiB that a plan has for them.
TEST_F(CudnnRefuses, MoreDocumentsThanWorkspaceIsPlannedFor) {
  AGOQ_NEEDS_GPU();
  Pair pair(std::size_t{512} << 20);
  Attention attention{{1, 1, 64}, Lengths(140000, 1)};
  for (std::size_t d = 0; d < attention.lengths.size(); d += 2) attention.lengths[d] = 2;
  attention.lengths.back() += next();
  const BothRuns run(pair, attention, kBf16, /*drawn=*/true);
  if (!has_cudnn(run)) GTEST_SKIP() << "cuDNN is not there";
  const Results plain = results_of_plain_kernels(pair, run);
  const std::string said = run_again(pair, run);
  EXPECT_NE(said.find("cuDNN does not serve attention forward"), std::string::npos) << said;
  EXPECT_NE(said.find("cuDNN does not serve attention backward"), std::string::npos) << said;
  // The same kernels, so the same bits.
  const Results served = results(pair, run);
  EXPECT_EQ(served.out, plain.out);
  EXPECT_EQ(served.log_sum_exp, plain.log_sum_exp);
  EXPECT_EQ(served.gradient, plain.gradient);
  EXPECT_EQ(pair.cuda.workspace.used(), 0u);
}

// Groups of kv heads one after the other, in the workspace of one: forward the same bits, backward the
// same but for the order in which cuDNN adds.
TEST(CudaAttention, GroupsGiveWhatOneCallGives) {
  AGOQ_NEEDS_GPU();
  struct Ungrouped {
    ~Ungrouped() { cuda_backend().set_attention_groups(1); }
  } const ungrouped;
  bool first = true;
  for (const AttentionShape& shape :
       {AttentionShape{8, 4, 64}, AttentionShape{16, 4, 128}, AttentionShape{4, 4, 128}}) {
    for (const std::vector<std::int32_t>& lengths :
         {std::vector<std::int32_t>{1025}, {1024, 1024, 1024}, {700, 1, 324, 23, 500}}) {
      const Attention attention{shape, lengths};
      Pair pair(std::size_t{512} << 20);
      const BothRuns run(pair, attention, kBf16);
      Values out, gradient;
      std::size_t workspace = 0;
      for (const int groups : {1, 2, 4}) {
        SCOPED_TRACE(attention.name() + " in " + std::to_string(groups) + " groups");
        cuda_backend().set_attention_groups(groups);
        Arena measured = Arena::measuring("attention");
        const Context plan{cuda_backend(), {}, measured, {}};
        cuda_backend().attention_backward(plan, shape, run.dout.cuda, run.qkv.cuda, run.out.cuda,
                                          run.log_sum_exp.cuda, run.documents_at(run.starts.cuda),
                                          run.dqkv.cuda);
        pair.upload(run.out);  // what the CPU has there: not the results
        pair.upload(run.dqkv);
        testing::internal::CaptureStderr();
        run.on_cuda(pair);
        const std::string said = testing::internal::GetCapturedStderr();
        if (first && said.find("does not serve") == std::string::npos && !said.empty()) {
          GTEST_SKIP() << said;
        }
        first = false;
        EXPECT_EQ(said, "") << "plain kernels served";
        if (groups == 1) {
          out = pair.values(run.out.cuda);
          gradient = pair.values(run.dqkv.cuda);
        } else {
          // A ragged batch goes by parts of the heads already, which bounds what further groups save.
          EXPECT_LE(measured.high_water(), workspace);
          if (groups == 2 && shape.heads > shape.kv_heads) {
            EXPECT_LT(measured.high_water(), workspace);
          }
          EXPECT_EQ(pair.values(run.out.cuda), out);
          EXPECT_LE(relative_error(pair.values(run.dqkv.cuda), gradient), 2e-3);
        }
        workspace = measured.high_water();
      }
    }
  }
}

TEST(CudaAttention, RefusesHeadSizesThatItHasNoTilesFor) {
  AGOQ_NEEDS_GPU();
  for (const int size : {12, 264}) {
    Pair pair;
    const BothRuns run(pair, {{2, 1, size}, {16}}, kFp32);
    EXPECT_THROW(run.on_cuda(pair), Error);
  }
}

}  // namespace
}  // namespace agoq
