// causal_conv1d on the CPU. Reference: npu_ops/ops/causal_conv1d/reference.py
#include "causal_conv1d/walk.h"

namespace npu_ops {
namespace {

void forward(Tensor x, Tensor weight, std::optional<Tensor> bias, std::optional<Tensor> residual,
             std::optional<Tensor> initial_state, std::optional<Tensor> cu_seqlens, bool silu,
             Tensor y, std::optional<Tensor> final_state) {
  const Filter filter(weight, bias);
  const auto sequences = sequences_of(x, cu_seqlens);
  clear_behind(y, sequences);
  dispatch(x.scalar_type(), "x", [&]<class T>(T*) {
    const Inputs<T> in{Tokens<T>(x), Tokens<T>(residual), State<T>(initial_state)};
    std::vector<Block<T>> blocks;
    add_blocks(blocks, 0, filter.channels, Tokens<T>(y));
    walk(filter, in, blocks, sequences, silu);
    copy_final_states(in.x, in.state, State<T>(final_state), sequences, filter.channels);
  });
}

void backward(Tensor grad, std::optional<Tensor> grad_final_state, Tensor x, Tensor weight,
              std::optional<Tensor> bias, std::optional<Tensor> initial_state,
              std::optional<Tensor> cu_seqlens, bool silu, Tensor grad_x, Tensor grad_weight,
              std::optional<Tensor> grad_bias, std::optional<Tensor> grad_initial_state) {
  const Filter filter(weight, bias);
  const auto sequences = sequences_of(x, cu_seqlens);
  Sums sums(filter, sequences);
  clear_behind(grad_x, sequences);
  dispatch(x.scalar_type(), "x", [&]<class T>(T*) {
    const Gradients<T> all{Tokens<T>(x), Tokens<T>(grad_x), State<T>(grad_final_state),
                           State<T>(initial_state), State<T>(grad_initial_state)};
    std::vector<Block<T>> blocks;
    add_blocks(blocks, 0, filter.channels, Tokens<T>(grad));
    walk_backward(filter, all, sums, blocks, sequences, silu);
  });
  sums.total(grad_weight, grad_bias);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, CPU, m) {
  m.impl("causal_conv1d_cpu", TORCH_BOX(&forward));
  m.impl("causal_conv1d_backward_cpu", TORCH_BOX(&backward));
}

}  // namespace npu_ops
