// awqctl matmul: activations from a file or drawn at random, one call, what ran and how fast.
#include <new>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/awqctl/commands.h"
#include "client/files/npy.h"
#include "client/files/tensor_file.h"
#include "nlohmann/json.hpp"

namespace awqd::awqctl {
namespace {

constexpr absl::Duration kCallTimeout = absl::Seconds(60);

// Of --random. With its names a request must stay below Protocol Buffers' 2 GiB. Shared memory has
// no such bound; there it is 4 GiB of floats, drawn before they are converted.
constexpr int64_t kMostRequestBytes = (int64_t{1} << 31) - 65536;
constexpr int64_t kMostSharedValues = int64_t{1} << 30;

absl::StatusOr<client::Tensor> ReadTensor(const std::string& path, client::DType dtype) try {
  absl::StatusOr<client::NpyArray> array = client::ReadNpy(path);
  if (!array.ok()) return array.status();
  absl::StatusOr<client::Tensor> tensor = client::ToTensor(*std::move(array));
  if (tensor.ok() && dtype != v1::DTYPE_UNSPECIFIED) tensor = client::Convert(*tensor, dtype);
  if (tensor.ok()) return tensor;
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", tensor.status().message()));
} catch (const std::bad_alloc&) {
  // What the file asks for once it is converted.
  return absl::ResourceExhaustedError(absl::StrCat(path, ": not enough memory to convert it"));
}

// The same numbers on every platform, which the standard library's distributions are not.
std::vector<float> Uniform(int64_t count, uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) {
    value = static_cast<float>(static_cast<double>(engine() >> 11) * 0x1p-52 - 1.0);
  }
  return values;
}

absl::Status WriteNpy(const std::string& path, const client::Tensor& output) {
  absl::StatusOr<client::Tensor> tensor =
      output.dtype == v1::BF16 ? client::Convert(output, v1::FP32) : output;
  if (!tensor.ok()) return tensor.status();
  auto writer = client::TensorFileWriter::Create(path, "output", tensor->dtype, tensor->shape);
  if (!writer.ok()) return writer.status();
  if (absl::Status status = (*writer)->Append(tensor->bytes); !status.ok()) return status;
  return (*writer)->Commit();
}

void Print(const Flags& flags, const client::MatmulResult& result, absl::Duration elapsed,
           Console& console) {
  const v1::Execution& ran = result.execution;
  const double latency_ms = absl::ToDoubleMilliseconds(elapsed);
  if (flags.json) {
    nlohmann::ordered_json json = {{"dtype", std::string(client::Name(result.output.dtype))},
                                   {"shape", result.output.shape},
                                   {"path", PathName(ran.path())},
                                   {"kernel", ran.kernel()},
                                   {"device", ran.device()},
                                   {"batch_tokens", ran.batch_tokens()},
                                   {"batch_requests", ran.batch_requests()},
                                   {"queue_us", ran.queue_us()},
                                   {"compute_us", ran.compute_us()},
                                   {"latency_ms", latency_ms},
                                   {"output", flags.output}};
    console.out << json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
    return;
  }
  console.out << absl::StrFormat(
      "%s %s  path %s  kernel %s  device %s  latency %.3f ms (queue %.3f, compute %.3f)\n",
      client::Name(result.output.dtype), client::ShapeString(result.output.shape),
      PathName(ran.path()), Printable(ran.kernel()), Printable(ran.device()), latency_ms,
      static_cast<double>(ran.queue_us()) / 1000, static_cast<double>(ran.compute_us()) / 1000);
  if (!flags.output.empty()) console.out << "wrote " << flags.output << "\n";
}

// Reads or draws what goes into the call; an exit code when it cannot.
std::optional<int> FillOperands(const Flags& flags, client::Client& client, Console& console,
                                client::MatmulCall& call) {
  if (!flags.bias.empty()) {
    auto bias = ReadTensor(flags.bias, v1::DTYPE_UNSPECIFIED);
    if (!bias.ok()) return FileFailed(bias.status(), console);
    call.bias = *std::move(bias);
  }
  if (!flags.random_tokens.has_value()) {
    auto activations = ReadTensor(flags.input, flags.dtype);
    if (!activations.ok()) return FileFailed(activations.status(), console);
    call.activations = *std::move(activations);
    return std::nullopt;
  }
  const absl::StatusOr<v1::WeightInfo> weight = FindWeight(flags, client);
  if (!weight.ok()) return CallFailed(weight.status(), flags, client, console);
  const int64_t k = weight->k();
  const int64_t tokens = *flags.random_tokens;
  const client::DType dtype = flags.dtype == v1::DTYPE_UNSPECIFIED ? v1::FP16 : flags.dtype;
  const int64_t most =
      flags.shared_memory ? kMostSharedValues : kMostRequestBytes / client::SizeOf(dtype);
  int64_t count = 0;
  if (__builtin_mul_overflow(tokens, k, &count) || count < 0 || count > most) {
    return BadArguments(
        absl::InvalidArgumentError(absl::StrCat("--random: got ", tokens, " x ", k, " values of ",
                                                client::Name(dtype), ", expected at most ", most)),
        console);
  }
  auto activations = client::Tensor::FromFloats(dtype, {tokens, k}, Uniform(count, flags.seed));
  if (!activations.ok()) return BadArguments(activations.status(), console);
  call.activations = *std::move(activations);
  return std::nullopt;
}

// For --shared_memory: activations and answer of the call, one after the other.
absl::StatusOr<client::SharedMemory> Share(const Flags& flags, client::Client& client,
                                           client::MatmulCall& call) {
  const auto weight = FindWeight(flags, client);
  if (!weight.ok()) return weight.status();
  client::Tensor& x = call.activations;
  const auto in = static_cast<int64_t>(x.bytes.size());
  const client::DType dtype =
      call.output_dtype == v1::DTYPE_UNSPECIFIED ? x.dtype : call.output_dtype;
  const int64_t k = x.shape.empty() ? 0 : x.shape.back();
  const int64_t tokens = k == 0 ? 0 : in / client::SizeOf(x.dtype) / k;
  int64_t out = 0;
  if (__builtin_mul_overflow(tokens * client::SizeOf(dtype), weight->n(), &out)) {
    return absl::InvalidArgumentError("output: the answer would pass 2^63 bytes");
  }
  auto memory = CreateSharedMemory(flags, client, in + out);
  if (!memory.ok()) return memory.status();
  x.bytes.copy(memory->data(), x.bytes.size());
  x.bytes.clear();
  call.shared_activations = memory->Range(0, in);
  call.shared_output = memory->Range(in, out);
  return memory;
}

}  // namespace

int Matmul(const Flags& flags, client::Client& client, Console& console) {
  if (!flags.output.empty()) {
    const auto format = client::TensorFileFormatOf(flags.output, v1::FP32);
    if (!format.ok()) return BadArguments(format.status(), console);
    if (*format != client::TensorFileFormat::kNpy) {
      return BadArguments(
          absl::InvalidArgumentError("output: got '" + flags.output + "', expected .npy"), console);
    }
  }
  client::MatmulCall call = {.weight = client::WeightName{flags.model, flags.weight},
                             .activations = {},
                             .output_dtype = flags.output_dtype,
                             .path = flags.path};
  if (const auto exit_code = FillOperands(flags, client, console, call)) return *exit_code;
  client::SharedMemory memory;
  if (flags.shared_memory) {
    auto shared = Share(flags, client, call);
    if (!shared.ok()) return CallFailed(shared.status(), flags, client, console);
    memory = *std::move(shared);
  }
  const std::optional<v1::SharedMemory> output = call.shared_output;
  const absl::Time start = absl::Now();
  auto result = client.QuantizedMatmul(std::move(call), Deadline(flags, kCallTimeout));
  const absl::Duration elapsed = absl::Now() - start;
  if (!result.ok()) return CallFailed(result.status(), flags, client, console);
  if (output) {
    result->output.bytes.assign(memory.data() + output->offset(),
                                static_cast<size_t>(output->size()));
  }
  if (!flags.output.empty()) {
    if (absl::Status status = WriteNpy(flags.output, result->output); !status.ok()) {
      return FileFailed(status, console);
    }
  }
  Print(flags, *result, elapsed, console);
  return kOk;
}

}  // namespace awqd::awqctl
