// Causal grouped-query attention within documents, tile by tile (Dao et al., FlashAttention, 2022): no
// S x S matrix exists, only kTile x kTile pieces of it.
//
// Forward, for a query i of document d and the keys j <= i of d, scale = 1 / sqrt(head_size):
//   s_ij = scale q_i k_j    L_i = log sum_j exp(s_ij)    o_i = sum_j exp(s_ij - L_i) v_j
// Backward, with p_ij = exp(s_ij - L_i) and D_i = do_i o_i:
//   dv_j = sum_i p_ij do_i    ds_ij = p_ij (do_i v_j - D_i)
//   dq_i = scale sum_j ds_ij k_j    dk_j = scale sum_i ds_ij q_i, sums over the query heads of a group
//
// Layout. Score tiles are [keys, queries]: a query is a lane, so maxima, sums and exponentials over keys
// need no reduction across lanes. Tiles of the two sides start at the same multiples of kTile of the
// document, so only the tile on the diagonal is masked; there, work goes in strips of kStrip keys or
// queries and skips what lies above the diagonal. Tiles are padded with zeros to whole strips and lanes.
//
// Forward: (query tile, head) belongs to one thread. Backward: (document, kv head) does, and runs
// through its query heads and tiles in order, so that no sum depends on the number of threads.
// Workspace, per thread: a few tiles; backward also k, v, dk and dv of one head of the longest document
// in the compute type.
#include <omp.h>

#include <algorithm>
#include <limits>

#include "backend/cpu/exponential.h"
#include "backend/cpu/storage.h"
#include "backend/cpu/tile_product.h"

namespace agoq::cpu::AGOQ_CPU_ISA {
namespace {

constexpr std::int64_t kTile = 64;
constexpr std::int64_t kStrip = 16;  // a multiple of kTileRows and of every kLanes

template <typename T>
constexpr T kMinusInfinity = -std::numeric_limits<T>::infinity();

// Offsets of one token's heads in the interleaved tensor.
struct Geometry {
  std::int64_t heads, kv_heads, size;  // size: of a head
  std::int64_t qkv_width, out_width;
  std::int64_t padded;  // head size in whole lanes
  std::int64_t group() const { return heads / kv_heads; }
  std::int64_t query(std::int64_t head) const { return head * size; }
  std::int64_t key(std::int64_t kv_head) const { return (heads + kv_head) * size; }
  std::int64_t value(std::int64_t kv_head) const { return (heads + kv_heads + kv_head) * size; }
};

Geometry geometry_of(const AttentionShape& shape, ElementType type) {
  const std::int64_t lanes = type == ElementType::kFp64 ? kLanes<double> : kLanes<float>;
  return {shape.heads,       shape.kv_heads,       shape.head_size,
          shape.qkv_width(), shape.output_width(), round_up(shape.head_size, lanes)};
}

// Cuts a thread's scratch into pieces; with no scratch it only counts.
template <typename T>
class Pieces {
 public:
  explicit Pieces(T* memory) : memory_(memory) {}
  T* take(std::int64_t count) {
    T* piece = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += round_up(count, 64 / static_cast<std::int64_t>(sizeof(T)));  // whole cache lines
    return piece;
  }
  std::int64_t used() const { return used_; }

 private:
  T* memory_;
  std::int64_t used_ = 0;
};

// `rows` rows of `size` elements, times scale, as rows of `padded` elements; zeros up to padded_rows.
template <typename Storage, typename T>
void load_rows(const Storage* source, std::int64_t stride, std::int64_t rows, std::int64_t padded_rows,
               const Geometry& g, T scale, T* __restrict tile) {
  for (std::int64_t row = 0; row < rows; ++row) {
    T* out = tile + row * g.padded;
    const Storage* in = source + row * stride;
    for (std::int64_t i = 0; i < g.size; ++i) out[i] = load(in[i]) * scale;
    for (std::int64_t i = g.size; i < g.padded; ++i) out[i] = T{0};
  }
  std::fill(tile + rows * g.padded, tile + padded_rows * g.padded, T{0});
}

// [rows, padded] to [size, kTile].
template <typename T>
void transpose_tile(const T* __restrict tile, std::int64_t rows, const Geometry& g, T* __restrict out) {
  for (std::int64_t i = 0; i < g.size; ++i) {
    for (std::int64_t row = 0; row < rows; ++row) out[i * kTile + row] = tile[row * g.padded + i];
  }
}

template <typename T, typename Storage>
void store_rows(const T* tile, std::int64_t rows, const Geometry& g, T scale, Storage* destination,
                std::int64_t stride) {
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t i = 0; i < g.size; ++i) {
      store(tile[row * g.padded + i] * scale, destination[row * stride + i]);
    }
  }
}

// A key tile and the query tile that meets it.
struct TilePair {
  std::int64_t keys;     // rows of the score tile
  std::int64_t queries;  // lanes of it in use, whole strips
  bool diagonal;
  // First lane that key `key` takes part in, in whole strips.
  std::int64_t first_query(std::int64_t key) const { return diagonal ? key / kStrip * kStrip : 0; }
};

// scores[key][query] = a[key] . b[.][query]; a [keys, padded], b [size, kTile].
template <typename T>
void score_product(const TilePair& pair, const Geometry& g, const T* a, const T* b, T* scores) {
  for (std::int64_t key = 0; key < pair.keys; key += kStrip) {
    const std::int64_t first = pair.first_query(key);
    const std::int64_t rows = std::min(kStrip, round_up(pair.keys - key, kTileRows));
    tile_product<TileSum::kSet, T>(rows, pair.queries - first, g.size, {a + key * g.padded, g.padded, 1},
                                   b + first, kTile, scores + key * kTile + first, kTile);
  }
}

// out[query] += sum over keys of scores[key][query] rows[key]; both [., padded].
template <typename T>
void sum_over_keys(const TilePair& pair, const Geometry& g, const T* scores, const T* rows, T* out) {
  for (std::int64_t query = 0; query < pair.queries; query += kStrip) {
    const std::int64_t keys = pair.diagonal ? std::min(pair.keys, query + kStrip) : pair.keys;
    tile_product<TileSum::kAdd, T>(kStrip, g.padded, keys, {scores + query, 1, kTile}, rows, g.padded,
                                   out + query * g.padded, g.padded);
  }
}

// out[key] += sum over queries of scores[key][query] rows[query]; both [., padded].
template <typename T>
void sum_over_queries(const TilePair& pair, const Geometry& g, const T* scores, const T* rows, T* out) {
  for (std::int64_t key = 0; key < pair.keys; key += kStrip) {
    const std::int64_t first = pair.first_query(key);
    const std::int64_t count = std::min(kStrip, round_up(pair.keys - key, kTileRows));
    tile_product<TileSum::kAdd, T>(count, g.padded, pair.queries - first,
                                   {scores + key * kTile + first, kTile, 1}, rows + first * g.padded,
                                   g.padded, out + key * g.padded, g.padded);
  }
}

// Lanes of `key` whose query comes before it, in the strip where the diagonal runs.
template <typename T>
void mask(const TilePair& pair, std::int64_t key, T value, T* row) {
  if (pair.diagonal) std::fill(row + pair.first_query(key), row + key, value);
}

struct QueryTile {
  std::int32_t document_start;
  std::int32_t first;  // of the tile, within the document
  std::int32_t queries;
};

template <typename T>
struct ForwardScratch {
  T *query, *query_transposed, *key, *value, *scores, *out, *most, *total, *correction;
  ForwardScratch(Pieces<T>& pieces, const Geometry& g)
      : query(pieces.take(kTile * g.padded)),
        query_transposed(pieces.take(g.size * kTile)),
        key(pieces.take(kTile * g.padded)),
        value(pieces.take(kTile * g.padded)),
        scores(pieces.take(kTile * kTile)),
        out(pieces.take(kTile * g.padded)),
        most(pieces.take(kTile)),
        total(pieces.take(kTile)),
        correction(pieces.take(kTile)) {}
};

// Scores to exp(score - largest so far); keeps largest and sum per query, and the factor by which what
// was summed before has to shrink.
template <typename T>
void online_softmax(const TilePair& pair, const ForwardScratch<T>& scratch) {
  T* __restrict most = scratch.most;
  T* __restrict total = scratch.total;
  T* __restrict correction = scratch.correction;
  std::copy_n(most, kTile, correction);
  for (std::int64_t key = 0; key < pair.keys; ++key) {
    T* __restrict row = scratch.scores + key * kTile;
    mask(pair, key, kMinusInfinity<T>, row);
    for (std::int64_t query = pair.first_query(key); query < pair.queries; ++query) {
      most[query] = row[query] > most[query] ? row[query] : most[query];
    }
  }
  for (std::int64_t query = 0; query < pair.queries; ++query) {
    correction[query] = exponential(correction[query] - most[query]);
    total[query] *= correction[query];
  }
  for (std::int64_t key = 0; key < pair.keys; ++key) {
    T* __restrict row = scratch.scores + key * kTile;
    for (std::int64_t query = pair.first_query(key); query < pair.queries; ++query) {
      row[query] = exponential(row[query] - most[query]);
      total[query] += row[query];
    }
  }
}

template <typename Storage>
void forward_tile(const Geometry& g, const Storage* qkv, const QueryTile& tile, std::int64_t head,
                  const ForwardScratch<Compute<Storage>>& scratch, Storage* out,
                  Compute<Storage>* log_sum_exp) {
  using T = Compute<Storage>;
  const std::int64_t queries = round_up(tile.queries, kStrip);
  const std::int64_t kv_head = head / g.group();
  const Storage* document = qkv + tile.document_start * g.qkv_width;
  const T scale = T{1} / std::sqrt(static_cast<T>(g.size));
  load_rows(document + tile.first * g.qkv_width + g.query(head), g.qkv_width, tile.queries, queries, g,
            scale, scratch.query);
  transpose_tile(scratch.query, queries, g, scratch.query_transposed);
  // Lowest instead of -infinity: the difference of two infinities would be NaN.
  std::fill_n(scratch.most, kTile, std::numeric_limits<T>::lowest());
  std::fill_n(scratch.total, kTile, T{0});
  std::fill_n(scratch.out, queries * g.padded, T{0});
  const std::int64_t end = tile.first + tile.queries;
  for (std::int64_t first = 0; first < end; first += kTile) {
    const TilePair pair{std::min(kTile, end - first), queries, first == tile.first};
    const Storage* keys = document + first * g.qkv_width;
    load_rows(keys + g.key(kv_head), g.qkv_width, pair.keys, round_up(pair.keys, kTileRows), g, T{1},
              scratch.key);
    load_rows(keys + g.value(kv_head), g.qkv_width, pair.keys, pair.keys, g, T{1}, scratch.value);
    score_product(pair, g, scratch.key, scratch.query_transposed, scratch.scores);
    online_softmax(pair, scratch);
    for (std::int64_t query = 0; query < queries; ++query) {
      T* row = scratch.out + query * g.padded;
      const T factor = scratch.correction[query];
      for (std::int64_t i = 0; i < g.padded; ++i) row[i] *= factor;
    }
    sum_over_keys(pair, g, scratch.scores, scratch.value, scratch.out);
  }
  const std::int64_t token = tile.document_start + tile.first;
  for (std::int64_t query = 0; query < tile.queries; ++query) {
    store_rows(scratch.out + query * g.padded, 1, g, T{1} / scratch.total[query],
               out + (token + query) * g.out_width + head * g.size, g.out_width);
    log_sum_exp[(token + query) * g.heads + head] = scratch.most[query] + std::log(scratch.total[query]);
  }
}

template <typename T>
struct BackwardScratch {
  T *query, *query_transposed, *dout, *dout_transposed, *scores, *dscores, *dquery;
  T *log_sum_exp, *delta;
  T *key, *value, *dkey, *dvalue;  // of the whole document
  BackwardScratch(Pieces<T>& pieces, const Geometry& g, std::int64_t longest)
      : query(pieces.take(kTile * g.padded)),
        query_transposed(pieces.take(g.size * kTile)),
        dout(pieces.take(kTile * g.padded)),
        dout_transposed(pieces.take(g.size * kTile)),
        scores(pieces.take(kTile * kTile)),
        dscores(pieces.take(kTile * kTile)),
        dquery(pieces.take(kTile * g.padded)),
        log_sum_exp(pieces.take(kTile)),
        delta(pieces.take(kTile)),
        key(pieces.take(round_up(longest, kStrip) * g.padded)),
        value(pieces.take(round_up(longest, kStrip) * g.padded)),
        dkey(pieces.take(round_up(longest, kStrip) * g.padded)),
        dvalue(pieces.take(round_up(longest, kStrip) * g.padded)) {}
};

template <typename Storage>
struct BackwardTensors {
  using T = Compute<Storage>;
  const Storage *dout, *qkv, *out;
  const T* log_sum_exp;
  Storage* dqkv;
};

// scores: s to p; dscores: do.v to ds.
template <typename T>
void softmax_backward(const TilePair& pair, const BackwardScratch<T>& scratch) {
  const T* __restrict log_sum_exp = scratch.log_sum_exp;
  const T* __restrict delta = scratch.delta;
  for (std::int64_t key = 0; key < pair.keys; ++key) {
    T* __restrict p = scratch.scores + key * kTile;
    T* __restrict ds = scratch.dscores + key * kTile;
    mask(pair, key, kMinusInfinity<T>, p);
    mask(pair, key, T{0}, ds);
    for (std::int64_t query = pair.first_query(key); query < pair.queries; ++query) {
      p[query] = exponential(p[query] - log_sum_exp[query]);
      ds[query] = p[query] * (ds[query] - delta[query]);
    }
  }
  // The products take keys in whole tile rows.
  for (std::int64_t key = pair.keys; key < round_up(pair.keys, kTileRows); ++key) {
    std::fill_n(scratch.scores + key * kTile, kTile, T{0});
    std::fill_n(scratch.dscores + key * kTile, kTile, T{0});
  }
}

template <typename Storage>
void backward_query_tile(const Geometry& g, const BackwardTensors<Storage>& tensors, std::int64_t start,
                         std::int64_t first, std::int64_t count, std::int64_t head,
                         const BackwardScratch<Compute<Storage>>& scratch) {
  using T = Compute<Storage>;
  const std::int64_t queries = round_up(count, kStrip);
  const std::int64_t token = start + first;
  const T scale = T{1} / std::sqrt(static_cast<T>(g.size));
  const Storage* dout = tensors.dout + token * g.out_width + head * g.size;
  const Storage* out = tensors.out + token * g.out_width + head * g.size;
  load_rows(tensors.qkv + token * g.qkv_width + g.query(head), g.qkv_width, count, queries, g, scale,
            scratch.query);
  load_rows(dout, g.out_width, count, queries, g, T{1}, scratch.dout);
  transpose_tile(scratch.query, queries, g, scratch.query_transposed);
  transpose_tile(scratch.dout, queries, g, scratch.dout_transposed);
  for (std::int64_t query = 0; query < count; ++query) {
    const Storage* out_row = out + query * g.out_width;
    const T* dout_row = scratch.dout + query * g.padded;
    scratch.delta[query] =
        lane_sum<T>(g.size, [=](std::int64_t i) { return dout_row[i] * load(out_row[i]); });
    scratch.log_sum_exp[query] = tensors.log_sum_exp[(token + query) * g.heads + head];
  }
  // Padding has probability 0 everywhere.
  std::fill(scratch.delta + count, scratch.delta + queries, T{0});
  std::fill(scratch.log_sum_exp + count, scratch.log_sum_exp + queries, std::numeric_limits<T>::max());
  std::fill_n(scratch.dquery, queries * g.padded, T{0});
  for (std::int64_t key = 0; key < first + count; key += kTile) {
    const TilePair pair{std::min(kTile, first + count - key), queries, key == first};
    const std::int64_t offset = key * g.padded;
    score_product(pair, g, scratch.key + offset, scratch.query_transposed, scratch.scores);
    score_product(pair, g, scratch.value + offset, scratch.dout_transposed, scratch.dscores);
    softmax_backward(pair, scratch);
    sum_over_queries(pair, g, scratch.scores, scratch.dout, scratch.dvalue + offset);
    sum_over_queries(pair, g, scratch.dscores, scratch.query, scratch.dkey + offset);
    sum_over_keys(pair, g, scratch.dscores, scratch.key + offset, scratch.dquery);
  }
  store_rows(scratch.dquery, count, g, scale, tensors.dqkv + token * g.qkv_width + g.query(head),
             g.qkv_width);
}

template <typename Storage>
void backward_document(const Geometry& g, const BackwardTensors<Storage>& tensors, std::int64_t start,
                       std::int64_t length, std::int64_t kv_head,
                       const BackwardScratch<Compute<Storage>>& scratch) {
  using T = Compute<Storage>;
  const std::int64_t padded_length = round_up(length, kStrip);
  const Storage* document = tensors.qkv + start * g.qkv_width;
  load_rows(document + g.key(kv_head), g.qkv_width, length, padded_length, g, T{1}, scratch.key);
  load_rows(document + g.value(kv_head), g.qkv_width, length, padded_length, g, T{1}, scratch.value);
  std::fill_n(scratch.dkey, padded_length * g.padded, T{0});
  std::fill_n(scratch.dvalue, padded_length * g.padded, T{0});
  for (std::int64_t head = kv_head * g.group(); head < (kv_head + 1) * g.group(); ++head) {
    for (std::int64_t first = 0; first < length; first += kTile) {
      backward_query_tile(g, tensors, start, first, std::min(kTile, length - first), head, scratch);
    }
  }
  Storage* ddocument = tensors.dqkv + start * g.qkv_width;
  // The query tile was scaled, so dk is complete.
  store_rows(scratch.dkey, length, g, T{1}, ddocument + g.key(kv_head), g.qkv_width);
  store_rows(scratch.dvalue, length, g, T{1}, ddocument + g.value(kv_head), g.qkv_width);
}

void check_shapes(std::string_view operation, const AttentionShape& shape, const Tensor& qkv,
                  const Tensor& out, const Tensor& log_sum_exp, const Documents& documents) {
  check(
      shape.heads > 0 && shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0 && shape.head_size > 0,
      "{}: {} heads must be a multiple of {} kv heads, of size {}", operation, shape.heads,
      shape.kv_heads, shape.head_size);
  expect(operation, "qkv", qkv, qkv.type, qkv.rows(), shape.qkv_width());
  expect(operation, "out", out, qkv.type, qkv.rows(), shape.output_width());
  expect(operation, "log_sum_exp", log_sum_exp, statistics_type(qkv.type), qkv.rows(), shape.heads);
  // Its memory may be planned for more documents than there are.
  check(documents.starts && documents.starts.type == ElementType::kInt32 &&
            documents.starts.count() > documents.count,
        "{}: documents.starts must be int32 with {} elements or more and is {} {}", operation,
        documents.count + 1, name_of(documents.starts.type), documents.starts.shape.to_string());
}

const std::int32_t* check_documents(std::string_view operation, const Documents& documents,
                                    std::int64_t tokens) {
  const std::int32_t* starts = documents.starts.as<std::int32_t>();
  check(starts[0] == 0 && starts[documents.count] == tokens,
        "{}: documents must cover tokens 0 to {} and cover {} to {}", operation, tokens, starts[0],
        starts[documents.count]);
  for (std::int64_t d = 0; d < documents.count; ++d) {
    check(starts[d + 1] >= starts[d] && starts[d + 1] - starts[d] <= documents.longest,
          "{}: document {} goes from token {} to {}; starts must not fall, and longest is {}", operation,
          d, starts[d], starts[d + 1], documents.longest);
  }
  return starts;
}

}  // namespace

void CpuBackend::attention_forward(const Context& context, const AttentionShape& shape,
                                   const Tensor& qkv, const Documents& documents, const Tensor& out,
                                   const Tensor& log_sum_exp) {
  check_shapes("attention_forward", shape, qkv, out, log_sum_exp, documents);
  const Arena::Scope scope(context.workspace);
  const std::int64_t tokens = qkv.rows();
  const int threads = omp_get_max_threads();
  // Planned before the documents are known: a tile has at least one token.
  const std::int64_t most_tiles = tokens;
  auto* tiles = reinterpret_cast<QueryTile*>(
      context.workspace.take(static_cast<std::size_t>(most_tiles) * sizeof(QueryTile)));
  for_storage("attention_forward", qkv.type, [&]<typename Storage>() {
    using T = Compute<Storage>;
    const Geometry g = geometry_of(shape, qkv.type);
    Pieces<T> counting(nullptr);
    ForwardScratch<T>(counting, g);
    const std::int64_t per_thread = counting.used();
    const Tensor scratch = context.workspace.take(statistics_type(qkv.type), Shape{threads, per_thread});
    if (context.workspace.is_measuring()) return;
    const std::int32_t* starts = check_documents("attention_forward", documents, tokens);
    std::int64_t count = 0;
    for (std::int64_t d = 0; d < documents.count; ++d) {
      const std::int32_t length = starts[d + 1] - starts[d];
      for (std::int32_t first = 0; first < length; first += kTile) {
        tiles[count++] = {starts[d], first, std::min<std::int32_t>(kTile, length - first)};
      }
    }
    const Storage* qkv_data = qkv.as<Storage>();
    Storage* out_data = out.as<Storage>();
    T* lse_data = log_sum_exp.as<T>();
    T* scratch_data = scratch.as<T>();
#pragma omp parallel num_threads(tokens* g.qkv_width > kSerialElements ? threads : 1)
    {
      Pieces<T> pieces(scratch_data + omp_get_thread_num() * per_thread);
      const ForwardScratch<T> mine(pieces, g);
      // Backwards: the tiles with the most keys first, so that the threads end together.
#pragma omp for schedule(dynamic)
      for (std::int64_t task = count * g.heads - 1; task >= 0; --task) {
        forward_tile(g, qkv_data, tiles[task / g.heads], task % g.heads, mine, out_data, lse_data);
      }
    }
  });
}

void CpuBackend::attention_backward(const Context& context, const AttentionShape& shape,
                                    const Tensor& dout, const Tensor& qkv, const Tensor& out,
                                    const Tensor& log_sum_exp, const Documents& documents,
                                    const Tensor& dqkv) {
  check_shapes("attention_backward", shape, qkv, out, log_sum_exp, documents);
  expect("attention_backward", "dout", dout, qkv.type, qkv.rows(), shape.output_width());
  expect("attention_backward", "dqkv", dqkv, qkv.type, qkv.rows(), shape.qkv_width());
  check(dqkv.data != qkv.data, "attention_backward: dqkv must not be qkv: it is read to the end");
  const Arena::Scope scope(context.workspace);
  const std::int64_t tokens = qkv.rows();
  const int threads = omp_get_max_threads();
  for_storage("attention_backward", qkv.type, [&]<typename Storage>() {
    using T = Compute<Storage>;
    const Geometry g = geometry_of(shape, qkv.type);
    const std::int64_t longest = std::min(documents.longest, tokens);
    Pieces<T> counting(nullptr);
    BackwardScratch<T>(counting, g, longest);
    const std::int64_t per_thread = counting.used();
    const Tensor scratch = context.workspace.take(statistics_type(qkv.type), Shape{threads, per_thread});
    if (context.workspace.is_measuring()) return;
    const std::int32_t* starts = check_documents("attention_backward", documents, tokens);
    const BackwardTensors<Storage> tensors{dout.as<Storage>(), qkv.as<Storage>(), out.as<Storage>(),
                                           log_sum_exp.as<T>(), dqkv.as<Storage>()};
    T* scratch_data = scratch.as<T>();
#pragma omp parallel num_threads(tokens* g.qkv_width > kSerialElements ? threads : 1)
    {
      Pieces<T> pieces(scratch_data + omp_get_thread_num() * per_thread);
      const BackwardScratch<T> mine(pieces, g, longest);
#pragma omp for schedule(dynamic)
      for (std::int64_t task = 0; task < documents.count * g.kv_heads; ++task) {
        const std::int64_t d = task / g.kv_heads;
        backward_document(g, tensors, starts[d], starts[d + 1] - starts[d], task % g.kv_heads, mine);
      }
    }
  });
}

}  // namespace agoq::cpu::AGOQ_CPU_ISA
