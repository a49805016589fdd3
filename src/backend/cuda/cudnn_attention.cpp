#include "backend/cuda/cudnn_attention.h"

#include "backend/cuda/device.h"
#include "backend/cuda/ragged_offsets.h"
#include "backend/gpu_requirements.h"

#ifdef AGOQ_HAS_CUDNN
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpragmas"
#include <cudnn_frontend.h>
#pragma GCC diagnostic pop
#include <dlfcn.h>
#endif

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <compare>
#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>

#ifdef AGOQ_HAS_CUDNN
/// The frontend looks up cuDNN's functions here.
void* cudnn_frontend::cudnn_dlhandle = nullptr;
#endif

namespace agoq::cuda {
namespace {

constexpr std::size_t kMebibyte = std::size_t{1} << 20;

/// Bytes per token of what cuDNN 9.19 keeps on Hopper during a backward pass: FP32 sums of dq; dk and dv
/// per query head where heads share them, of `shared` bytes; the row sums of the softmax's gradient.
std::size_t sums_bytes(int row_sums, int heads, const AttentionShape& shape, std::size_t shared) {
  const auto width = static_cast<std::size_t>(heads) * static_cast<std::size_t>(shape.head_size);
  const std::size_t per_head = shape.heads == shape.kv_heads ? 0 : 2 * shared;
  return width * (sizeof(float) + per_head) + static_cast<std::size_t>(row_sums) * sizeof(float);
}

std::size_t dense_bytes(const AttentionShape& shape, std::int64_t tokens, int groups) {
  return static_cast<std::size_t>(tokens) *
         sums_bytes(shape.heads, shape.heads / groups, shape, sizeof(std::uint16_t));
}

std::int64_t whole_tiles(std::int64_t tokens) { return (tokens + 127) / 128 * 128; }

/// Sums, for which the frontend takes FP32, and q, k, v, dq, dk and dv of one part of the heads.
std::size_t ragged_bytes(const AttentionShape& shape, std::int64_t tokens, int parts) {
  const auto copies = static_cast<std::size_t>(2 * shape.qkv_width() / parts) * sizeof(std::uint16_t);
  return static_cast<std::size_t>(whole_tiles(tokens)) *
             (copies + sums_bytes(shape.heads, shape.heads / parts, shape, sizeof(float))) +
         6 * 256;
}

/// The fewest parts that take no more memory than a dense batch in `groups`; else one key/value head
/// each.
int parts_of(const AttentionShape& shape, int groups) {
  for (int parts = 1; parts < shape.kv_heads; ++parts) {
    if (shape.kv_heads % parts == 0 &&
        ragged_bytes(shape, 1024, parts) <= dense_bytes(shape, 1024, groups)) {
      return parts;
    }
  }
  return shape.kv_heads;
}

void warn(std::string_view text) {
  fmt::print(stderr, "agoq: {}; attention uses plain kernels, which are several times slower\n", text);
}

}  // namespace

std::size_t CudnnAttention::planned_bytes(const AttentionShape& shape, std::int64_t tokens,
                                          bool backward, int groups) {
  // For the offsets of ragged batches and cuDNN's small change.
  std::size_t bytes = 4 * kMebibyte;
  if (!backward) return bytes;
  return bytes + std::max(dense_bytes(shape, tokens, groups),
                          ragged_bytes(shape, tokens, parts_of(shape, groups)));
}

#ifndef AGOQ_HAS_CUDNN

struct CudnnAttention::State {
  bool warned = false;
  std::string problem;  // none: the build asks for no cuDNN
};

CudnnAttention::CudnnAttention() : state_(std::make_unique<State>()) {}
CudnnAttention::~CudnnAttention() = default;

bool CudnnAttention::available() {
  if (!state_->warned) warn("this build has no cuDNN (see ./dev build)");
  state_->warned = true;
  return false;
}
std::string CudnnAttention::description() { return "not in this build (see ./dev build)"; }
const std::string& CudnnAttention::problem() { return state_->problem; }
bool CudnnAttention::forward(const Context&, const AttentionShape&, const Tensor&, const Documents&,
                             const Tensor&, const Tensor&, std::byte*) {
  return false;
}
bool CudnnAttention::backward(const Context&, const AttentionShape&, const Tensor&, const Tensor&,
                              const Tensor&, const Tensor&, const Documents&, const Tensor&, int,
                              std::byte*) {
  return false;
}

#else

namespace {

namespace fe = cudnn_frontend;
using fe::graph::Tensor_attributes;
using TensorHandle = std::shared_ptr<Tensor_attributes>;

std::size_t round_up(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

/// Bytes of the offsets of `batch` documents, each array at a multiple of 256.
std::size_t offsets_bytes(std::int64_t batch) {
  const auto documents = static_cast<std::size_t>(batch);
  return round_up(documents * sizeof(std::int32_t)) +
         4 * round_up((documents + 1) * sizeof(std::int64_t));
}

enum Uid : std::int64_t {
  kQ = 1,
  kK,
  kV,
  kO,
  kStats,
  kDO,
  kDQ,
  kDK,
  kDV,
  kLengths,
  kQkvOffsets,
  kOutOffsets,
  kKvOffsets,
  kStatsOffsets
};

struct GraphKey {
  int heads, kv_heads, head_size;  // of a part
  std::int64_t batch, longest;
  std::int64_t tokens;  // 0 for dense graphs: batch * longest
  bool backward;
  int parts = 1;  // calls: the heads of memory are so many times those of the graph
  auto operator<=>(const GraphKey&) const = default;
  bool ragged() const { return tokens != 0; }
};

struct Graph {
  std::shared_ptr<fe::graph::Graph> graph;
  std::size_t workspace = 0;
  std::string failure;  // why it is not used; empty for one that is
};

/// Makes the tensors and the node of a graph.
class GraphMaker {
 public:
  GraphMaker(const GraphKey& key, int capability)
      : key_(key),
        shape_{key.heads * key.parts, key.kv_heads * key.parts, key.head_size},
        graph_(std::make_shared<fe::graph::Graph>()) {
    graph_->set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT)
        .set_sm_version(capability);  // nodes take it over when they are added
    if (!key.ragged()) return;
    lengths_ = plain(kLengths, "lengths", key.batch, fe::DataType_t::INT32);
    qkv_offsets_ = plain(kQkvOffsets, "qkv_offsets", key.batch + 1, fe::DataType_t::INT64);
    out_offsets_ = plain(kOutOffsets, "out_offsets", key.batch + 1, fe::DataType_t::INT64);
    if (key.backward) {
      kv_offsets_ = plain(kKvOffsets, "kv_offsets", key.batch + 1, fe::DataType_t::INT64);
    }
    stats_offsets_ = plain(kStatsOffsets, "stats_offsets", key.batch + 1, fe::DataType_t::INT64);
  }

  std::shared_ptr<fe::graph::Graph> make() {
    key_.backward ? add_backward() : add_forward();
    return graph_;
  }

 private:
  TensorHandle plain(std::int64_t uid, const char* name, std::int64_t count, fe::DataType_t type) {
    return graph_->tensor(Tensor_attributes()
                              .set_name(name)
                              .set_uid(uid)
                              .set_dim({count, 1, 1, 1})
                              .set_stride({1, 1, 1, 1})
                              .set_data_type(type));
  }
  /// [batch, heads, longest, width] over memory with `per_token` elements per token.
  void place(Tensor_attributes& tensor, std::int64_t uid, std::int64_t heads, std::int64_t width,
             std::int64_t per_token, fe::DataType_t type, const TensorHandle& offsets) const {
    tensor.set_uid(uid)
        .set_dim({key_.batch, heads, key_.longest, width})
        .set_stride({key_.longest * per_token, width, per_token, 1})
        .set_data_type(type);
    if (key_.ragged()) tensor.set_ragged_offset(offsets);
  }
  /// Queries, keys or values, or their gradients: interleaved, but in tensors of their own where a
  /// ragged batch goes backward.
  void place_section(Tensor_attributes& tensor, std::int64_t uid, std::int64_t heads) const {
    const bool apart = key_.ragged() && key_.backward;
    const bool query = uid == kQ || uid == kDQ;
    place(tensor, uid, heads, key_.head_size, apart ? heads * key_.head_size : shape_.qkv_width(),
          fe::DataType_t::BFLOAT16, query || !apart ? qkv_offsets_ : kv_offsets_);
  }
  TensorHandle heads_of_qkv(std::int64_t uid, const char* name, std::int64_t heads) const {
    Tensor_attributes tensor;
    tensor.set_name(name);
    place_section(tensor, uid, heads);
    return graph_->tensor(tensor);
  }
  TensorHandle output_like(std::int64_t uid, const char* name) const {
    Tensor_attributes tensor;
    tensor.set_name(name);
    place(tensor, uid, key_.heads, key_.head_size, shape_.output_width(), fe::DataType_t::BFLOAT16,
          out_offsets_);
    return graph_->tensor(tensor);
  }
  void place_statistics(Tensor_attributes& tensor) const {
    place(tensor, kStats, key_.heads, 1, shape_.heads, fe::DataType_t::FLOAT, stats_offsets_);
  }

  template <typename Attributes>
  void set_masks(Attributes& attributes) const {
    attributes.set_name("attention")
        .set_attn_scale(1.0f / std::sqrt(static_cast<float>(key_.head_size)))
        .set_causal_mask(true);
    if (!key_.ragged()) return;
    attributes.set_padding_mask(true).set_seq_len_q(lengths_).set_seq_len_kv(lengths_);
  }

  void add_forward() {
    fe::graph::SDPA_attributes attributes;
    attributes.set_generate_stats(true);
    set_masks(attributes);
    const auto [out, stats] =
        graph_->sdpa(heads_of_qkv(kQ, "q", key_.heads), heads_of_qkv(kK, "k", key_.kv_heads),
                     heads_of_qkv(kV, "v", key_.kv_heads), attributes);
    out->set_output(true);
    place(*out, kO, key_.heads, key_.head_size, shape_.output_width(), fe::DataType_t::BFLOAT16,
          out_offsets_);
    stats->set_output(true);
    place_statistics(*stats);
  }

  void add_backward() {
    fe::graph::SDPA_backward_attributes attributes;
    set_masks(attributes);
    // Without it the sums have batch * longest rows instead of one per token. The frontend puts cuDNN's
    // own workspace behind them: whole tiles keep that aligned.
    if (key_.ragged()) {
      const std::int64_t rows = whole_tiles(key_.tokens);
      attributes.set_max_total_seq_len_q(rows).set_max_total_seq_len_kv(rows);
    }
    Tensor_attributes statistics;
    statistics.set_name("stats");
    place_statistics(statistics);
    const auto [dq, dk, dv] =
        graph_->sdpa_backward(heads_of_qkv(kQ, "q", key_.heads), heads_of_qkv(kK, "k", key_.kv_heads),
                              heads_of_qkv(kV, "v", key_.kv_heads), output_like(kO, "o"),
                              output_like(kDO, "do"), graph_->tensor(statistics), attributes);
    const auto gradient = [&](Tensor_attributes& tensor, std::int64_t uid, std::int64_t heads) {
      tensor.set_output(true);
      place_section(tensor, uid, heads);
    };
    gradient(*dq, kDQ, key_.heads);
    gradient(*dk, kDK, key_.kv_heads);
    gradient(*dv, kDV, key_.kv_heads);
  }

  GraphKey key_;
  AttentionShape shape_;
  std::shared_ptr<fe::graph::Graph> graph_;
  TensorHandle lengths_, qkv_offsets_, out_offsets_, kv_offsets_, stats_offsets_;
};

/// cuDNN lists every engine that it tried.
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

Graph build_graph(const GraphKey& key, cudnnHandle_t handle) {
  Graph built;
  built.graph = GraphMaker(key, device().capability).make();
  fe::error_t status = built.graph->build(handle, {fe::HeurMode_t::A});
  if (status.is_bad()) {
    built.failure = first_line(status.get_message());
    return built;
  }
  std::int64_t bytes = 0;
  if (built.graph->get_workspace_size(bytes).is_bad()) built.failure = "its workspace is unknown";
  built.workspace = static_cast<std::size_t>(bytes);
  return built;
}

GraphKey key_of(const AttentionShape& shape, const Documents& documents, std::int64_t tokens,
                bool backward, int groups) {
  GraphKey key{shape.heads, shape.kv_heads, shape.head_size, documents.count, documents.longest,
               0,           backward};
  if (documents.count == 1) {
    // Documents::longest may be a bound; the length of a single document is known.
    key.longest = tokens;
  } else if (documents.count * documents.longest != tokens) {
    // No document is longer than `longest`, so together they reach this sum only if all are as long.
    key.batch = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(documents.count)));
    key.longest = std::min(documents.longest, tokens);
    key.tokens = tokens;
  }
  if (backward) {
    key.parts = key.ragged() ? parts_of(shape, groups) : groups;
    key.heads /= key.parts;
    key.kv_heads /= key.parts;
  }
  return key;
}

}  // namespace

struct CudnnAttention::State {
  bool looked = false, warned = false;
  // Known after look():
  std::string problem;
  LibraryVersion version;
  void* library = nullptr;
  cudnnHandle_t handle = nullptr;
  std::map<GraphKey, Graph> graphs;

  bool look() {
    if (looked) return problem.empty();
    looked = true;
    const std::string name = fmt::format("libcudnn.so.{}", CUDNN_MAJOR);
    library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    const char* const words = library == nullptr ? dlerror() : nullptr;
    LibraryVersion found;
    if (library != nullptr) {
      using Version = std::size_t (*)();
      const auto get_version = reinterpret_cast<Version>(dlsym(library, "cudnnGetVersion"));
      const int number = get_version == nullptr ? 0 : static_cast<int>(get_version());  // 91900: 9.19.0
      found = {number / 10000, number % 10000 / 100};
    }
    problem =
        cudnn_problem({CUDNN_MAJOR, CUDNN_MINOR}, found, words == nullptr ? "it is no cuDNN" : words);
    if (problem.empty()) cudnn_frontend::cudnn_dlhandle = library;
    version = found;
    return problem.empty();
  }

  /// Cuts memory into pieces at multiples of 256 bytes.
  struct Pieces {
    std::byte* memory;
    std::byte* cut(std::size_t bytes) {
      std::byte* const piece = memory;
      memory += round_up(bytes);
      return piece;
    }
  };
  using Pointers = std::unordered_map<std::int64_t, void*>;

  /// The sections of qkv and dqkv of one part of the heads, in memory of their own.
  struct Apart {
    static constexpr std::int64_t kUids[6] = {kQ, kK, kV, kDQ, kDK, kDV};
    std::size_t row[6];  // bytes of a token
    std::byte* memory[6];

    static std::size_t bytes(const AttentionShape& part, std::int64_t tokens) {
      return static_cast<std::size_t>(2 * tokens * part.qkv_width()) * sizeof(std::uint16_t) + 6 * 256;
    }
    Apart(const GraphKey& key, Pieces& pieces) {
      for (int i = 0; i < 6; ++i) {
        const int heads = i % 3 == 0 ? key.heads : key.kv_heads;
        row[i] = static_cast<std::size_t>(heads * key.head_size) * sizeof(std::uint16_t);
        memory[i] = pieces.cut(static_cast<std::size_t>(key.tokens) * row[i]);
      }
    }
    /// Sections first to first + 2 of `part`, whose rows are `pitch` bytes apart in the whole.
    void copy(int first, bool in, const Pointers& whole, int part, std::size_t pitch,
              std::int64_t tokens, cudaStream_t stream) const {
      for (int i = first; i < first + 3; ++i) {
        std::byte* const there =
            static_cast<std::byte*>(whole.at(kUids[i])) + static_cast<std::size_t>(part) * row[i];
        expect_success(
            cudaMemcpy2DAsync(in ? memory[i] : there, in ? row[i] : pitch, in ? there : memory[i],
                              in ? pitch : row[i], row[i], static_cast<std::size_t>(tokens),
                              cudaMemcpyDeviceToDevice, stream),
            "attention_backward");
      }
    }
  };

  /// Null when cuDNN does not serve it within `planned` bytes; says so once per graph.
  const Graph* graph(const GraphKey& key, std::size_t planned) {
    if (!look()) return nullptr;
    auto known = graphs.find(key);
    if (known == graphs.end()) {
      Graph built;
      try {
        if (handle == nullptr) {
          check(fe::detail::create_handle(&handle) == CUDNN_STATUS_SUCCESS, "cudnnCreate failed");
        }
        built = build_graph(key, handle);
      } catch (const std::exception& error) {  // the frontend throws where it opens libraries
        built.failure = first_line(error.what());
      }
      std::size_t needed = round_up(built.workspace);
      if (key.ragged()) needed += offsets_bytes(key.batch);
      if (key.ragged() && key.backward) {
        needed += Apart::bytes({key.heads, key.kv_heads, key.head_size}, key.tokens);
      }
      if (built.failure.empty() && needed > planned) {
        built.failure = fmt::format("it asks for {} MiB of workspace and {} are planned",
                                    needed / kMebibyte, planned / kMebibyte);
      }
      if (!built.failure.empty()) {
        warn(fmt::format(
            "cuDNN does not serve attention {} with {}/{} heads of {}, {} documents up to {}: {}",
            key.backward ? "backward" : "forward", key.heads, key.kv_heads, key.head_size, key.batch,
            key.longest, built.failure));
        built.graph.reset();
      }
      known = graphs.emplace(key, std::move(built)).first;
    }
    return known->second.graph == nullptr ? nullptr : &known->second;
  }

  static void add_offsets(const GraphKey& key, const AttentionShape& shape, const Documents& documents,
                          Pieces& pieces, cudaStream_t stream, Pointers& pointers) {
    const auto batch = static_cast<std::size_t>(key.batch);
    const auto cut_offsets = [&] {
      return reinterpret_cast<std::int64_t*>(pieces.cut((batch + 1) * sizeof(std::int64_t)));
    };
    RaggedOffsets offsets{};
    offsets.lengths = reinterpret_cast<std::int32_t*>(pieces.cut(batch * sizeof(std::int32_t)));
    offsets.qkv = cut_offsets();
    offsets.out = cut_offsets();
    offsets.kv = cut_offsets();
    offsets.statistics = cut_offsets();
    make_ragged_offsets(documents.starts.as<std::int32_t>(), documents.count, key.batch,
                        key.backward ? key.heads * key.head_size : shape.qkv_width(),
                        shape.output_width(), std::int64_t{key.kv_heads} * key.head_size, shape.heads,
                        offsets, stream);
    pointers[kLengths] = offsets.lengths;
    pointers[kQkvOffsets] = offsets.qkv;
    pointers[kOutOffsets] = offsets.out;
    if (key.backward) pointers[kKvOffsets] = offsets.kv;
    pointers[kStatsOffsets] = offsets.statistics;
  }

  /// Where the heads of a part begin, in tensors of all heads.
  static Pointers pointers_of_part(const GraphKey& key, const Pointers& whole, int part) {
    const auto head_bytes = static_cast<std::size_t>(key.head_size) * sizeof(std::uint16_t);
    const auto first = static_cast<std::size_t>(part);
    Pointers own = whole;
    const auto advance = [&](std::initializer_list<std::int64_t> uids, int heads) {
      for (const std::int64_t uid : uids) {
        own[uid] =
            static_cast<std::byte*>(own[uid]) + first * static_cast<std::size_t>(heads) * head_bytes;
      }
    };
    advance({kQ, kO, kDO, kDQ}, key.heads);
    advance({kK, kV, kDK, kDV}, key.kv_heads);
    own[kStats] = static_cast<float*>(own[kStats]) + part * key.heads;
    return own;
  }

  bool run(const Context& context, const AttentionShape& shape, const Documents& documents,
           std::int64_t tokens, bool backward, int groups, std::byte* workspace, Pointers pointers) {
    const GraphKey key = key_of(shape, documents, tokens, backward, groups);
    const Graph* const found = graph(key, planned_bytes(shape, tokens, backward, groups));
    if (found == nullptr) return false;
    const cudaStream_t stream = stream_of(context.stream);
    Pieces pieces{workspace};
    pieces.cut(found->workspace);
    if (key.ragged()) add_offsets(key, shape, documents, pieces, stream, pointers);
    const std::string_view operation = backward ? "attention_backward" : "attention_forward";
    check(fe::detail::set_stream(handle, stream) == CUDNN_STATUS_SUCCESS,
          "{}: cuDNN does not take the stream", operation);
    const auto execute = [&](Pointers& of) {
      fe::error_t status = found->graph->execute(handle, of, workspace);
      if (status.is_bad()) {
        throw Error(ErrorKind::kDevice,
                    device_failure(operation, "cuDNN", first_line(status.get_message()),
                                   waits_for_each_operation()));
      }
      expect_launched(operation);
    };
    if (!backward) {
      execute(pointers);
      return true;
    }
    if (!key.ragged()) {
      for (int part = 0; part < key.parts; ++part) {
        Pointers own = pointers_of_part(key, pointers, part);
        execute(own);
      }
      return true;
    }
    const Apart apart(key, pieces);
    const std::size_t pitch = static_cast<std::size_t>(shape.qkv_width()) * sizeof(std::uint16_t);
    for (int part = 0; part < key.parts; ++part) {
      apart.copy(0, true, pointers, part, pitch, tokens, stream);
      Pointers own = pointers_of_part(key, pointers, part);
      for (int i = 0; i < 6; ++i) own[Apart::kUids[i]] = apart.memory[i];
      execute(own);
      apart.copy(3, false, pointers, part, pitch, tokens, stream);
    }
    return true;
  }
};

namespace {

/// Where queries, keys and values of the interleaved tensor begin.
struct Sections {
  std::byte *query, *key, *value;
  Sections(const Tensor& qkv, const AttentionShape& shape) {
    const auto head_bytes = static_cast<std::int64_t>(shape.head_size * size_of(qkv.type));
    query = qkv.data;
    key = query + shape.heads * head_bytes;
    value = key + shape.kv_heads * head_bytes;
  }
};

}  // namespace

CudnnAttention::CudnnAttention() : state_(std::make_unique<State>()) {}

// Left to the end of the process: by the time the backend, which is static, is destroyed, the driver
// that handle and graphs refer to may be gone.
CudnnAttention::~CudnnAttention() { static_cast<void>(state_.release()); }

bool CudnnAttention::available() {
  const bool found = state_->look();
  if (!found && !state_->warned) warn(state_->problem);
  state_->warned = true;
  return found;
}
std::string CudnnAttention::description() {
  return state_->look() ? to_string(state_->version) : state_->problem;
}
const std::string& CudnnAttention::problem() {
  state_->look();
  return state_->problem;
}

bool CudnnAttention::forward(const Context& context, const AttentionShape& shape, const Tensor& qkv,
                             const Documents& documents, const Tensor& out, const Tensor& log_sum_exp,
                             std::byte* workspace) {
  const Sections in(qkv, shape);
  return state_->run(
      context, shape, documents, qkv.rows(), false, 1, workspace,
      {{kQ, in.query}, {kK, in.key}, {kV, in.value}, {kO, out.data}, {kStats, log_sum_exp.data}});
}

bool CudnnAttention::backward(const Context& context, const AttentionShape& shape, const Tensor& dout,
                              const Tensor& qkv, const Tensor& out, const Tensor& log_sum_exp,
                              const Documents& documents, const Tensor& dqkv, int groups,
                              std::byte* workspace) {
  const Sections in(qkv, shape), gradient(dqkv, shape);
  return state_->run(context, shape, documents, qkv.rows(), true, groups, workspace,
                     {{kQ, in.query},
                      {kK, in.key},
                      {kV, in.value},
                      {kO, out.data},
                      {kDO, dout.data},
                      {kStats, log_sum_exp.data},
                      {kDQ, gradient.query},
                      {kDK, gradient.key},
                      {kDV, gradient.value}});
}

#endif

}  // namespace agoq::cuda
