// A call from C++: one product with a weight of a loaded model.
//
// Usage: awqd_example <address> <model> <weight>
#include <cstdlib>
#include <iostream>
#include <vector>

#include "client/awqd_client.h"

namespace {

using awqd::client::Client;

absl::Status Run(const char* address, const char* model, const char* weight) {
  absl::StatusOr<std::unique_ptr<Client>> client = Client::Create({.address = address});
  if (!client.ok()) return client.status();

  // How long a row must be: K of the weight.
  const auto info = (*client)->GetModel(model);
  if (!info.ok()) return info.status();
  int64_t k = 0;
  for (const auto& row : info->weights()) {
    if (row.path() == weight) k = row.k();
  }

  // Two rows of ones, sent as FP16.
  const std::vector<float> ones(2 * k, 1.0f);
  auto x = awqd::client::Tensor::FromFloats(awqd::v1::FP16, {2, k}, ones);
  if (!x.ok()) return x.status();

  const auto y = (*client)->QuantizedMatmul(
      {.weight = awqd::client::WeightName{model, weight}, .activations = *std::move(x)},
      {.timeout = absl::Seconds(10)});
  if (!y.ok()) return y.status();

  const auto values = y->output.ToFloats();
  if (!values.ok()) return values.status();
  std::cout << "y is " << awqd::client::ShapeString(y->output.shape)
            << ", y[0][0] = " << values->front() << ", computed by " << y->execution.kernel()
            << "\n";
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: awqd_example <address> <model> <weight>\n";
    return EXIT_FAILURE;
  }
  const absl::Status status = Run(argv[1], argv[2], argv[3]);
  if (!status.ok()) {
    std::cerr << status << "\n";
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}
