// What holds for every model operation alike: the same bytes for any number of threads, agreement of the
// builds, and a measuring context that takes the workspace of a real call and touches nothing.
#include <omp.h>

#include <cmath>

#include "backend/operation_testing.h"

namespace agoq {
namespace {

using namespace testing_operations;

constexpr auto kFp32 = ElementType::kFp32;

/// Takes tensors from `arena`; fills them unless it only measures.
class Maker {
 public:
  explicit Maker(Arena& arena) : arena_(arena) {}
  Tensor random(ElementType type, Shape shape) {
    const Tensor tensor = arena_.take(type, shape);
    if (!arena_.is_measuring()) Bench::set(tensor, normal(tensor.count(), ++drawn_));
    return tensor;
  }
  Tensor integers(const std::vector<std::int32_t>& values) {
    const Tensor tensor =
        arena_.take(ElementType::kInt32, Shape{static_cast<std::int64_t>(values.size())});
    if (!arena_.is_measuring()) std::copy(values.begin(), values.end(), tensor.as<std::int32_t>());
    return tensor;
  }

 private:
  Arena& arena_;
  std::uint32_t drawn_ = 0;
};

struct Operation {
  std::string name;
  /// Runs the operation on tensors from the maker and returns what it wrote.
  std::function<std::vector<Tensor>(const Context&, Maker&, ElementType)> run;
};

constexpr std::int64_t kTokens = 333, kWidth = 129;

std::vector<Operation> operations() {
  std::vector<Operation> all;
  for (const bool flip_a : {false, true}) {
    for (const bool flip_b : {false, true}) {
      all.push_back({"matmul", [=](const Context& context, Maker& maker, ElementType type) {
                       const std::int64_t m = 270, n = 401, k = 150;
                       const Tensor a = maker.random(type, flip_a ? Shape{k, m} : Shape{m, k});
                       const Tensor b = maker.random(type, flip_b ? Shape{n, k} : Shape{k, n});
                       const Tensor c = maker.random(type, Shape{m, n});
                       const Tensor exact = maker.random(statistics_type(type), Shape{m, n});
                       const Transpose ta = flip_a ? Transpose::kYes : Transpose::kNo;
                       const Transpose tb = flip_b ? Transpose::kYes : Transpose::kNo;
                       context.backend.matmul(context, a, ta, b, tb, c, true);
                       context.backend.matmul(context, a, ta, b, tb, exact, false);
                       return std::vector{c, exact};
                     }});
    }
  }
  for (const NormKind kind : {NormKind::kRmsNorm, NormKind::kLayerNorm}) {
    all.push_back(
        {"norm", [=](const Context& context, Maker& maker, ElementType type) {
           const bool weighted = kind == NormKind::kRmsNorm;
           const Tensor x = maker.random(type, Shape{kTokens, kWidth}), dy = maker.random(type, x.shape);
           const Tensor y = maker.random(type, x.shape), dx = maker.random(type, x.shape);
           const Tensor weight = weighted ? maker.random(type, Shape{kWidth}) : Tensor{};
           const Tensor dweight =
               weighted ? maker.random(statistics_type(type), Shape{kWidth}) : Tensor{};
           const Tensor rstd = maker.random(statistics_type(type), Shape{kTokens});
           context.backend.norm_forward(context, kind, x, weight, 1e-5, y, rstd);
           context.backend.norm_backward(context, kind, dy, x, weight, 1e-5, {}, dx, dweight);
           std::vector<Tensor> written{y, dx, rstd};
           if (weighted) written.push_back(dweight);
           return written;
         }});
  }
  all.push_back({"rope", [](const Context& context, Maker& maker, ElementType type) {
                   const AttentionShape shape{4, 2, 18};
                   std::vector<std::int32_t> positions;
                   for (std::int32_t i = 0; i < kTokens; ++i) positions.push_back(i % 50);
                   const Tensor qkv = maker.random(type, Shape{kTokens, shape.qkv_width()});
                   context.backend.rope(context, shape, qkv, maker.integers(positions),
                                        maker.random(statistics_type(type), Shape{50, 9, 2}), true);
                   return std::vector{qkv};
                 }});
  all.push_back({"attention", [](const Context& context, Maker& maker, ElementType type) {
                   const AttentionShape shape{4, 2, 20};
                   const Documents documents{maker.integers({0, 100, 101, 230, kTokens}), 4, 129};
                   const Tensor qkv = maker.random(type, Shape{kTokens, shape.qkv_width()});
                   const Tensor dqkv = maker.random(type, qkv.shape);
                   const Tensor out = maker.random(type, Shape{kTokens, shape.output_width()});
                   const Tensor dout = maker.random(type, out.shape);
                   const Tensor lse = maker.random(statistics_type(type), Shape{kTokens, shape.heads});
                   context.backend.attention_forward(context, shape, qkv, documents, out, lse);
                   context.backend.attention_backward(context, shape, dout, qkv, out, lse, documents,
                                                      dqkv);
                   return std::vector{out, lse, dqkv};
                 }});
  all.push_back({"swiglu", [](const Context& context, Maker& maker, ElementType type) {
                   const Tensor gate_up = maker.random(type, Shape{kTokens, 2 * kWidth});
                   const Tensor hidden = maker.random(type, Shape{kTokens, kWidth}),
                                again = maker.random(type, hidden.shape);
                   const Tensor dhidden = maker.random(type, hidden.shape),
                                dgate_up = maker.random(type, gate_up.shape);
                   context.backend.swiglu_forward(context, gate_up, hidden);
                   context.backend.swiglu_backward(context, dhidden, gate_up, dgate_up, again);
                   return std::vector{hidden, dgate_up, again};
                 }});
  all.push_back({"cross_entropy", [](const Context& context, Maker& maker, ElementType type) {
                   std::vector<std::int32_t> targets;
                   for (std::int32_t i = 0; i < kTokens; ++i) targets.push_back(i % kWidth);
                   const Tensor logits = maker.random(statistics_type(type), Shape{kTokens, kWidth});
                   const Tensor loss = maker.random(statistics_type(type), Shape{kTokens});
                   context.backend.cross_entropy(context, logits, maker.integers(targets),
                                                 maker.random(kFp32, Shape{kTokens}), loss, logits);
                   return std::vector{logits, loss};
                 }});
  all.push_back(
      {"movement", [](const Context& context, Maker& maker, ElementType type) {
         const Tensor a = maker.random(type, Shape{kTokens, kWidth}), b = maker.random(kFp32, a.shape);
         const Tensor converted = maker.random(type, a.shape), sum = maker.random(type, a.shape);
         context.backend.copy(context, b, converted);
         context.backend.add(context, a, converted, sum);
         context.backend.zero(context, a.data, a.bytes());
         return std::vector{a, converted, sum};
       }});
  return all;
}

struct Outcome {
  std::vector<Values> written;
  std::size_t workspace;  // bytes, high water
};

Outcome run(const Operation& operation, Backend& backend, ElementType type, int threads) {
  const int before = omp_get_max_threads();
  omp_set_num_threads(threads);
  Bench bench(backend);
  Arena memory("test tensors", host_allocator(), std::size_t{32} << 20);
  Maker maker(memory);
  Outcome result;
  for (const Tensor& tensor : operation.run(bench.context, maker, type)) {
    result.written.push_back(Bench::get(tensor));
  }
  result.workspace = bench.workspace().high_water();
  omp_set_num_threads(before);
  return result;
}

constexpr ElementType kTypes[] = {ElementType::kFp64, ElementType::kFp32, ElementType::kBf16};

TEST(EveryOperation, GivesTheSameForAnyNumberOfThreads) {
  for (const Build& build : builds()) {
    for (const Operation& operation : operations()) {
      for (const ElementType type : kTypes) {
        const Outcome one = run(operation, *build.backend, type, 1);
        for (const int threads : {2, 5}) {
          EXPECT_EQ(run(operation, *build.backend, type, threads).written, one.written)
              << operation.name << " " << name_of(type) << " " << build.name << " " << threads;
        }
      }
    }
  }
}

TEST(EveryOperation, AgreesBetweenTheBuilds) {
  const std::vector<Build> all = builds();
  if (all.size() < 2) GTEST_SKIP() << "this machine runs one build only";
  for (const Operation& operation : operations()) {
    for (const ElementType type : kTypes) {
      const Outcome plain = run(operation, *all[0].backend, type, 2),
                    fast = run(operation, *all[1].backend, type, 2);
      // FMA and lanes of another width: rounding of the compute type, and with BF16 of the result.
      const double tolerance = type == ElementType::kFp64 ? 1e-14 : type == kFp32 ? 2e-6 : 4e-3;
      for (std::size_t i = 0; i < plain.written.size(); ++i) {
        EXPECT_LE(relative_error(fast.written[i], plain.written[i]), tolerance)
            << operation.name << " " << name_of(type) << " output " << i;
      }
    }
  }
}

TEST(EveryOperation, MeasuresTheWorkspaceOfARealCall) {
  for (const Build& build : builds()) {
    for (const Operation& operation : operations()) {
      for (const ElementType type : kTypes) {
        Arena tensors = Arena::measuring("plan"), workspace = Arena::measuring("plan of the workspace");
        const Context context{*build.backend, {}, workspace, {}};
        Maker maker(tensors);
        operation.run(context, maker, type);  // a touch of measured memory faults
        EXPECT_EQ(workspace.high_water(),
                  run(operation, *build.backend, type, omp_get_max_threads()).workspace)
            << operation.name << " " << name_of(type) << " " << build.name;
        EXPECT_EQ(workspace.used(), 0u);
      }
    }
  }
}

TEST(EveryOperation, MeasuresALargeModelWithoutItsMemory) {
  Arena arena = Arena::measuring("plan");
  const Context context{cpu_backend(), {}, arena, {}};
  const std::int64_t tokens = 8192, hidden = 4096, vocabulary = 128256;
  const Tensor x = arena.take(ElementType::kBf16, Shape{tokens, hidden});
  const Tensor head = arena.take(ElementType::kBf16, Shape{vocabulary, hidden});
  const Tensor logits = arena.take(kFp32, Shape{tokens, vocabulary});
  const std::size_t before = arena.used();
  context.backend.matmul(context, x, Transpose::kNo, head, Transpose::kYes, logits);
  // Slabs of 2,048 rows and columns, and nothing the size of the vocabulary.
  EXPECT_LE(arena.high_water() - before, std::size_t{2} * 2048 * 4096 * 4 + (std::size_t{64} << 20));
}

}  // namespace
}  // namespace agoq
