// Trains a small network in C++ with 8-bit optimizer state and bfloat16 weights without a master
// copy, saves halfway, and resumes from the file.
//
//   train OUT [RECORD [START]]
//
// writes optimizer state to OUT, and weights and gradients to RECORD. START is an initial state,
// saved by C++ or Python.
#include <torch/nn/functional/activation.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <cstdio>
#include <memory>

#include "lowbit/optim.h"

namespace {

constexpr int kSteps = 40;

lowbit::AdamW make(const torch::nn::Sequential& net) {
  return lowbit::AdamW(net->named_parameters(),
                       lowbit::AdamWOptions(1e-2).weight_decay(0.1).seed(7));
}

torch::IValue weights_of(const torch::nn::Sequential& net, bool grads) {
  auto all = lowbit::detail::new_dict();
  for (const auto& p : net->named_parameters())
    all.insert(p.key(), (grads ? p.value().grad() : p.value().detach()).clone());
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "train OUT [RECORD [START]]\n"), 2;
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(64, 200), torch::nn::GELU(),
                            torch::nn::Linear(200, 10));
  net->to(torch::kBFloat16);
  auto opt = std::make_unique<lowbit::AdamW>(make(net));
  if (argc > 3) {
    lowbit::load(*opt, argv[3]);
    const auto state = opt->state_dict().toGenericDict().at("state").toGenericDict().at(0);
    std::printf("loaded step %.0f\n", state.toGenericDict().at("step").toTensor().item<double>());
  }
  auto record = lowbit::detail::new_dict();
  auto grads = lowbit::detail::new_list();
  record.insert("before", weights_of(net, false));
  double loss = 0;
  for (int step = 0; step < kSteps; ++step) {
    if (step == kSteps / 2) {  // as a program interrupted here would
      lowbit::save(*opt, argv[1]);
      opt = std::make_unique<lowbit::AdamW>(make(net));
      lowbit::load(*opt, argv[1]);
    }
    const auto x = torch::randn({32, 64});
    const auto y = net->forward(x.to(torch::kBFloat16)).to(torch::kFloat);
    const auto error = torch::mse_loss(y, x.slice(1, 0, 10).sin());
    opt->zero_grad();
    error.backward();
    grads.push_back(weights_of(net, true));
    opt->step();
    loss = error.item<double>();
    if (step % 10 == 0) std::printf("step %d, loss %.4f\n", step, loss);
  }
  std::printf("loss %.4f\n", loss);
  lowbit::save(*opt, argv[1]);
  if (argc > 2) {
    record.insert("grads", grads);
    record.insert("after", weights_of(net, false));
    const auto bytes = lowbit::detail::to_bytes(record);
    lowbit::write_whole(argv[2], bytes.data(), bytes.size());
  }
}
