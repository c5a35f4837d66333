// causal_conv1d_qkv on the CPU. Reference: npu_ops/ops/causal_conv1d_qkv/reference.py
#include "causal_conv1d/walk.h"

namespace npu_ops {
namespace {

// Returns the blocks of q, k and v, or of their gradients. heads: key heads, value heads, key
// head_dim, value head_dim. Without eps, q and k are not normalised.
template <class T>
std::vector<Block<T>> blocks_of(const Tensor& q, const Tensor& k, const Tensor& v,
                                const std::vector<int64_t>& heads,
                                const std::optional<double>& eps) {
  const int64_t keys = heads[0] * heads[2], values = heads[1] * heads[3], head = eps ? heads[2] : 0;
  STD_TORCH_CHECK(head <= kChannels, "q: needs heads of at most ", kChannels, " to normalise");
  const float inside = static_cast<float>(eps.value_or(0.0));
  std::vector<Block<T>> blocks;
  add_blocks(blocks, 0, keys, Tokens<T>(q), head, inside);
  add_blocks(blocks, keys, keys, Tokens<T>(k), head, inside);
  add_blocks(blocks, 2 * keys, values, Tokens<T>(v));
  return blocks;
}

void forward(Tensor x, Tensor weight, std::optional<Tensor> bias,
             std::optional<Tensor> initial_state, std::optional<Tensor> cu_seqlens, bool silu,
             std::optional<double> eps, std::vector<int64_t> heads, Tensor q, Tensor k, Tensor v,
             std::optional<Tensor> final_state) {
  const Filter filter(weight, bias);
  const auto sequences = sequences_of(x, cu_seqlens);
  for (const Tensor& output : {q, k, v}) clear_behind(output, sequences);
  dispatch(x.scalar_type(), "x", [&]<class T>(T*) {
    const Inputs<T> in{Tokens<T>(x), Tokens<T>(std::nullopt), State<T>(initial_state)};
    walk(filter, in, blocks_of<T>(q, k, v, heads, eps), sequences, silu);
    copy_final_states(in.x, in.state, State<T>(final_state), sequences, filter.channels);
  });
}

void backward(Tensor grad_q, Tensor grad_k, Tensor grad_v, std::optional<Tensor> grad_final_state,
              Tensor x, Tensor weight, std::optional<Tensor> bias,
              std::optional<Tensor> initial_state, std::optional<Tensor> cu_seqlens, bool silu,
              std::optional<double> eps, std::vector<int64_t> heads, Tensor grad_x,
              Tensor grad_weight, std::optional<Tensor> grad_bias,
              std::optional<Tensor> grad_initial_state) {
  const Filter filter(weight, bias);
  const auto sequences = sequences_of(x, cu_seqlens);
  Sums sums(filter, sequences);
  clear_behind(grad_x, sequences);
  dispatch(x.scalar_type(), "x", [&]<class T>(T*) {
    const Gradients<T> all{Tokens<T>(x), Tokens<T>(grad_x), State<T>(grad_final_state),
                           State<T>(initial_state), State<T>(grad_initial_state)};
    walk_backward(filter, all, sums, blocks_of<T>(grad_q, grad_k, grad_v, heads, eps), sequences,
                  silu);
  });
  sums.total(grad_weight, grad_bias);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, CPU, m) {
  m.impl("causal_conv1d_qkv_cpu", TORCH_BOX(&forward));
  m.impl("causal_conv1d_qkv_backward_cpu", TORCH_BOX(&backward));
}

}  // namespace npu_ops
