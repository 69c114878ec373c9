// awqctl quantize-kv: a block of keys or values to 4-bit codes and back, and what that lost.
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/awqctl/commands.h"
#include "client/awqctl/product.h"
#include "kernels/base/text.h"
#include "nlohmann/json.hpp"

namespace awqd::awqctl {
namespace {

constexpr absl::Duration kCallTimeout = absl::Seconds(60);

// |A - B| / |B|, Frobenius norms over the elements that are numbers.
double RelativeError(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    if (!std::isfinite(b[i])) continue;
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

absl::Status Write(const std::string& prefix, const client::QuantizeKvResult& result) {
  for (const auto& [name, tensor] : {std::pair{"codes", &result.codes},
                                     {"scales", &*result.scales},
                                     {"zeros", &*result.zeros}}) {
    const absl::Status status = WriteNpy(absl::StrCat(prefix, ".", name, ".npy"), *tensor);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

void Print(const Flags& flags, const client::QuantizeKvResult& result, int64_t bytes_before,
           double error, Console& console) {
  const v1::Execution& ran = result.execution;
  const auto bytes = static_cast<int64_t>(result.codes.bytes.size() + result.scales->bytes.size() +
                                          result.zeros->bytes.size());
  if (flags.json) {
    const nlohmann::ordered_json json = {{"codes_shape", result.codes.shape},
                                         {"scales_shape", result.scales->shape},
                                         {"scale_dtype", client::Name(result.scales->dtype)},
                                         {"bytes_before", bytes_before},
                                         {"bytes", bytes},
                                         {"relative_error", error},
                                         {"kernel", ran.kernel()},
                                         {"device", ran.device()},
                                         {"compute_us", ran.compute_us()},
                                         {"output", flags.output}};
    PrintJson(json, console);
    return;
  }
  console.out << absl::StrFormat(
      "codes %s, scales and zeros %s %s: %s of %s, relative error %.3g  kernel %s  device %s  "
      "compute %.3f ms\n",
      client::ShapeString(result.codes.shape), client::Name(result.scales->dtype),
      client::ShapeString(result.scales->shape), FormatBytes(bytes), FormatBytes(bytes_before),
      error, OneLine(ran.kernel()), OneLine(ran.device()),
      static_cast<double>(ran.compute_us()) / 1000);
  if (flags.output.empty()) return;
  console.out << "wrote " << flags.output << ".codes.npy, .scales.npy and .zeros.npy\n";
}

}  // namespace

int QuantizeKv(const Flags& flags, client::Client& client, Console& console) {
  const auto block = ReadTensor(flags.input, flags.dtype);
  if (!block.ok()) return FileFailed(block.status(), console);
  const auto before = block->ToFloats();
  if (!before.ok()) return FileFailed(before.status(), console);
  const client::CallOptions deadline = Deadline(flags, kCallTimeout);
  const auto result =
      client.QuantizeKv({.block = *block, .scale_dtype = flags.scale_dtype}, deadline);
  if (!result.ok()) return CallFailed(result.status(), flags, client, console);
  if (!result->scales.has_value()) {
    return CallFailed(absl::InternalError("the answer has no scales"), flags, client, console);
  }
  const auto again = client.DequantizeKv({.codes = result->codes,
                                          .scales = *result->scales,
                                          .zeros = *result->zeros,
                                          .head_dim = block->shape.back(),
                                          .output_dtype = v1::FP32},
                                         deadline);
  if (!again.ok()) return CallFailed(again.status(), flags, client, console);
  if (!flags.output.empty()) {
    if (absl::Status status = Write(flags.output, *result); !status.ok()) {
      return FileFailed(status, console);
    }
  }
  const double error = RelativeError(*again->output.ToFloats(), *before);
  Print(flags, *result, static_cast<int64_t>(block->bytes.size()), error, console);
  return kOk;
}

}  // namespace awqd::awqctl
