// SPDX-License-Identifier: Apache-2.0
// A step of gradient descent through attention: the gradients of a loss by q, k and v.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <flash3/flash3.hpp>
#include <initializer_list>
#include <memory>
#include <vector>

namespace {

constexpr int64_t kBatch = 1, kSeq = 128, kHeads = 4, kKvHeads = 2, kDim = 32;

flash3::Tensor q_shaped(std::vector<float>& data) {
  return flash3::tensor(data.data(), FLASH3_FLOAT32, {kBatch, kSeq, kHeads, kDim});
}
flash3::Tensor kv_shaped(std::vector<float>& data) {
  return flash3::tensor(data.data(), FLASH3_FLOAT32, {kBatch, kSeq, kKvHeads, kDim});
}

// Scratch memory of a call: the caller owns it, 256-byte aligned.
std::unique_ptr<void, decltype(&std::free)> scratch(size_t bytes) {
  return {std::aligned_alloc(256, (bytes + 256) / 256 * 256), std::free};
}

struct Model {
  std::vector<float> q = std::vector<float>(kBatch * kSeq * kHeads * kDim);
  std::vector<float> k = std::vector<float>(kBatch * kSeq * kKvHeads * kDim), v = k;
  std::vector<float> out = q, lse = std::vector<float>(kBatch * kHeads * kSeq);

  // Half the squared distance of the attention's output to 1, and in dout its gradient: out − 1.
  double loss(std::vector<float>* dout) {
    flash3::Forward call{.q = q_shaped(q),
                         .k = kv_shaped(k),
                         .v = kv_shaped(v),
                         .out = q_shaped(out),
                         .lse = flash3::lse_tensor(lse.data(), kBatch, kHeads, kSeq),
                         .causal = true};
    call.workspace_size = flash3::workspace(call);
    const auto memory = scratch(call.workspace_size);
    call.workspace = memory.get();
    flash3::forward(call);

    double sum = 0;
    dout->resize(out.size());
    for (size_t i = 0; i < out.size(); ++i) {
      (*dout)[i] = out[i] - 1;
      sum += 0.5 * (*dout)[i] * (*dout)[i];
    }
    return sum;
  }

  // The loss's gradient, from what loss() has left in out, lse and dout.
  void gradient(std::vector<float>& dout, Model* d) {
    flash3::Backward call{.dout = q_shaped(dout),
                          .q = q_shaped(q),
                          .k = kv_shaped(k),
                          .v = kv_shaped(v),
                          .out = q_shaped(out),
                          .lse = flash3::lse_tensor(lse.data(), kBatch, kHeads, kSeq),
                          .dq = q_shaped(d->q),
                          .dk = kv_shaped(d->k),
                          .dv = kv_shaped(d->v),
                          .causal = true};
    call.workspace_size = flash3::workspace(call);
    const auto memory = scratch(call.workspace_size);
    call.workspace = memory.get();
    flash3::backward(call);
  }
};

}  // namespace

int main() {
  Model model, d;
  for (size_t i = 0; i < model.q.size(); ++i) model.q[i] = std::sin(0.1f * static_cast<float>(i));
  for (size_t i = 0; i < model.k.size(); ++i) model.k[i] = std::cos(0.3f * static_cast<float>(i));
  for (size_t i = 0; i < model.v.size(); ++i) model.v[i] = std::sin(0.7f * static_cast<float>(i));

  try {
    std::vector<float> dout;
    const double before = model.loss(&dout);
    model.gradient(dout, &d);

    // Downhill by a small step: to first order the loss falls by step · |gradient|².
    constexpr float kStep = 1e-3f;
    double expected = 0;
    for (auto tensor : {&Model::q, &Model::k, &Model::v}) {
      for (size_t i = 0; i < (model.*tensor).size(); ++i) {
        const float slope = (d.*tensor)[i];
        (model.*tensor)[i] -= kStep * slope;
        expected += double{kStep} * slope * slope;
      }
    }
    const double fell = before - model.loss(&dout);
    std::printf("loss %.3f; it fell by %.4f, and the gradient said %.4f\n", before, fell, expected);
    if (expected > 0 && std::abs(fell - expected) < 0.02 * expected) return 0;
    std::fprintf(stderr, "the gradient is wrong\n");
  } catch (const flash3::Error& error) {
    std::fprintf(stderr, "flash3: %s\n", error.what());
  }
  return 1;
}
