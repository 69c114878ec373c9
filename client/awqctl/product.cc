// Operands of a product: read, drawn, or put into shared memory; its result printed and written.
#include "client/awqctl/product.h"

#include <algorithm>
#include <new>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/bench/payload.h"
#include "client/files/npy.h"
#include "client/files/tensor_file.h"
#include "kernels/base/text.h"
#include "nlohmann/json.hpp"

namespace awqd::awqctl {
namespace {

constexpr absl::Duration kCallTimeout = absl::Seconds(60);

// Of --random. With its names a request must stay below Protocol Buffers' 2 GiB. Shared memory has
// no such bound; there it is 4 GiB of floats, drawn before they are converted.
constexpr int64_t kMostRequestBytes = (int64_t{1} << 31) - 65536;
constexpr int64_t kMostSharedValues = int64_t{1} << 30;

absl::StatusOr<v1::StackInfo> FindStack(const Flags& flags, client::Client& client,
                                        const client::WeightName& wanted) {
  const auto model = client.GetModel(wanted.model, Deadline(flags, kCallTimeout));
  if (!model.ok()) return model.status();
  for (const v1::StackInfo& stack : model->stacks()) {
    if (stack.path() != wanted.name) continue;
    if (stack.refused().empty()) return stack;
    return absl::FailedPreconditionError(stack.refused());
  }
  return absl::NotFoundError(absl::StrCat("model '", wanted.model, "' has no stack '", wanted.name,
                                          "'; 'awqctl models ", wanted.model, "' lists them"));
}

absl::StatusOr<ProductTarget> FindOne(const Flags& flags, client::Client& client,
                                      const std::string& model, const std::string& path) {
  if (IsStack(path)) {
    const auto stack = FindStack(flags, client, {model, path});
    if (!stack.ok()) return stack.status();
    return ProductTarget{stack->k(), stack->n(), stack->experts()};
  }
  const auto weight = FindWeight(flags, client, {model, path});
  if (!weight.ok()) return weight.status();
  return ProductTarget{weight->k(), weight->n()};
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
    PrintJson(json, console);
    return;
  }
  console.out << absl::StrFormat(
      "%s %s  path %s  kernel %s  device %s  latency %.3f ms (queue %.3f, compute %.3f)\n",
      client::Name(result.output.dtype), client::ShapeString(result.output.shape),
      PathName(ran.path()), OneLine(ran.kernel()), OneLine(ran.device()), latency_ms,
      static_cast<double>(ran.queue_us()) / 1000, static_cast<double>(ran.compute_us()) / 1000);
  if (!flags.output.empty()) console.out << "wrote " << flags.output << "\n";
}

absl::StatusOr<client::Tensor> DrawActivations(const Flags& flags, int64_t k) {
  const int64_t tokens = *flags.random_tokens;
  const client::DType dtype = flags.dtype == v1::DTYPE_UNSPECIFIED ? v1::FP16 : flags.dtype;
  const int64_t most =
      flags.shared_memory ? kMostSharedValues : kMostRequestBytes / client::SizeOf(dtype);
  int64_t count = 0;
  if (__builtin_mul_overflow(tokens, k, &count) || count < 0 || count > most) {
    return absl::InvalidArgumentError(absl::StrCat("--random: got ", tokens, " x ", k,
                                                   " values of ", client::Name(dtype),
                                                   ", expected at most ", most));
  }
  return client::Tensor::FromFloats(dtype, {tokens, k}, bench::UniformValues(count, flags.seed));
}

absl::StatusOr<client::Routing> ReadRouting(const Flags& flags) {
  client::Routing out;
  auto ids = ReadTensor(flags.expert_ids, v1::DTYPE_UNSPECIFIED);
  if (!ids.ok()) return ids.status();
  out.expert_ids = *std::move(ids);
  if (flags.router_weights.empty()) return out;
  auto weights = ReadTensor(flags.router_weights, v1::DTYPE_UNSPECIFIED);
  if (!weights.ok()) return weights.status();
  out.router_weights = *std::move(weights);
  return out;
}

// Reads or draws; an exit code when it cannot. `target` is there for what is drawn.
std::optional<int> Fill(const Flags& flags, const std::optional<ProductTarget>& target,
                        Console& console, Operands& out) {
  if (flags.random_tokens.has_value()) {
    auto activations = DrawActivations(flags, target->k);
    if (!activations.ok()) return BadArguments(activations.status(), console);
    out.activations = *std::move(activations);
  } else {
    auto activations = ReadTensor(flags.input, flags.dtype);
    if (!activations.ok()) return FileFailed(activations.status(), console);
    out.activations = *std::move(activations);
  }
  if (!flags.expert_ids.empty()) {
    auto routing = ReadRouting(flags);
    if (!routing.ok()) return FileFailed(routing.status(), console);
    out.routing = *std::move(routing);
  } else if (flags.top_k.has_value() && (!target.has_value() || target->experts == 0)) {
    return BadArguments(absl::InvalidArgumentError(
                            "--top_k: got a number, expected none: there are no experts to draw"),
                        console);
  } else if (flags.random_tokens.has_value() && target->experts > 0) {
    const int64_t top_k = flags.top_k.value_or(std::min<int64_t>(2, target->experts));
    auto routing = bench::RandomRouting(*flags.random_tokens, top_k, target->experts, flags.seed);
    if (!routing.ok()) return BadArguments(routing.status(), console);
    out.routing = *std::move(routing);
  }
  return std::nullopt;
}

// For --shared_memory: activations and answer, one after the other.
absl::StatusOr<client::SharedMemory> MoveToSharedMemory(const Flags& flags, client::Client& client,
                                                        const ProductTarget& target,
                                                        Operands& operands) {
  client::Tensor& x = operands.activations;
  const auto in = static_cast<int64_t>(x.bytes.size());
  const bool scaled = flags.activation_scale.has_value() || !flags.activation_scales.empty();
  const client::DType of_int8 = scaled ? v1::FP16 : v1::INT32;
  const client::DType same = x.dtype == v1::INT8 ? of_int8 : x.dtype;
  const client::DType dtype =
      flags.output_dtype == v1::DTYPE_UNSPECIFIED ? same : flags.output_dtype;
  const int64_t k = x.shape.empty() ? 0 : x.shape.back();
  int64_t rows = k == 0 ? 0 : in / client::SizeOf(x.dtype) / k;
  if (operands.routing && !operands.routing->router_weights) {
    rows = static_cast<int64_t>(operands.routing->expert_ids.bytes.size() / sizeof(int32_t));
  }
  int64_t out = 0;
  if (__builtin_mul_overflow(rows * client::SizeOf(dtype), target.n, &out)) {
    return absl::InvalidArgumentError("output: the answer would pass 2^63 bytes");
  }
  auto memory = CreateSharedMemory(flags, client, in + out);
  if (!memory.ok()) return memory.status();
  x.bytes.copy(memory->data(), x.bytes.size());
  x.bytes.clear();
  operands.shared_activations = memory->Range(0, in);
  operands.shared_output = memory->Range(in, out);
  return memory;
}

absl::Status CheckOutput(const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  const auto format = client::TensorFileFormatOf(path, v1::FP32);
  if (!format.ok()) return format.status();
  if (*format == client::TensorFileFormat::kNpy) return absl::OkStatus();
  return absl::InvalidArgumentError("output: got '" + path + "', expected .npy");
}

}  // namespace

absl::StatusOr<ProductTarget> FindTarget(const Flags& flags, client::Client& client,
                                         const std::string& model, const ProductPaths& paths) {
  auto target = FindOne(flags, client, model, paths.first);
  if (!target.ok() || paths.last == paths.first) return target;
  const auto last = FindOne(flags, client, model, paths.last);
  if (!last.ok()) return last.status();
  target->n = last->n;
  return target;
}

bool IsStack(const std::string& path) { return absl::StrContains(path, "*"); }

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

absl::Status WriteNpy(const std::string& path, const client::Tensor& output) {
  absl::StatusOr<client::Tensor> tensor =
      output.dtype == v1::BF16 ? client::Convert(output, v1::FP32) : output;
  if (!tensor.ok()) return tensor.status();
  auto writer = client::TensorFileWriter::Create(path, "output", tensor->dtype, tensor->shape);
  if (!writer.ok()) return writer.status();
  if (absl::Status status = (*writer)->Append(tensor->bytes); !status.ok()) return status;
  return (*writer)->Commit();
}

int RunProduct(const Flags& flags, client::Client& client, Console& console,
               const ProductPaths& paths, const SendProduct& send) {
  if (absl::Status status = CheckOutput(flags.output); !status.ok()) {
    return BadArguments(status, console);
  }
  std::optional<ProductTarget> target;
  if (flags.random_tokens.has_value() || flags.shared_memory) {
    auto found = FindTarget(flags, client, flags.model, paths);
    if (!found.ok()) return CallFailed(found.status(), flags, client, console);
    target = *found;
  }
  Operands operands;
  if (const auto exit_code = Fill(flags, target, console, operands)) return *exit_code;
  client::SharedMemory memory;
  if (flags.shared_memory) {
    auto shared = MoveToSharedMemory(flags, client, *target, operands);
    if (!shared.ok()) return CallFailed(shared.status(), flags, client, console);
    memory = *std::move(shared);
  }
  const std::optional<v1::SharedMemory> output = operands.shared_output;
  const absl::Time start = absl::Now();
  auto result = send(std::move(operands));
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
