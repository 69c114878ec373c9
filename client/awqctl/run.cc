// awqctl from arguments to exit code, and what its subcommands share.
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "client/awqctl/commands.h"
#include "google/protobuf/util/json_util.h"

namespace awqd::awqctl {
namespace {

int Dispatch(const Flags& flags, client::Client& client, Console& console) {
  switch (flags.command) {
    case Flags::Command::kStatus:
      return Status(flags, client, console);
    case Flags::Command::kModels:
      return Models(flags, client, console);
    case Flags::Command::kLoad:
      return Load(flags, client, console);
    case Flags::Command::kUnload:
      return Unload(flags, client, console);
    case Flags::Command::kKernels:
      return Kernels(flags, client, console);
    case Flags::Command::kDequantize:
      return Dequantize(flags, client, console);
    case Flags::Command::kMatmul:
      return Matmul(flags, client, console);
    case Flags::Command::kCompare:
      break;  // has no client
    case Flags::Command::kHealthcheck:
      return Healthcheck(flags, client, console);
    case Flags::Command::kBench:
      return Bench(flags, client, console);
  }
  return kBadArguments;
}

int Run(const Flags& flags, Console& console) {
  // First: whatever address the environment names, no server is asked.
  if (flags.command == Flags::Command::kCompare) return Compare(flags, console);
  absl::StatusOr<std::unique_ptr<client::Client>> client = client::Client::Create(
      {.address = flags.address, .max_reconnect_delay = absl::Milliseconds(250)});
  if (!client.ok()) return BadArguments(client.status(), console);
  return Dispatch(flags, **client, console);
}

}  // namespace

int RunAwqctl(const std::vector<std::string>& args, Console& console) {
  int exit_code = kOk;
  const std::optional<Flags> flags = ParseFlags(args, console.out, console.err, exit_code);
  if (!flags.has_value()) return exit_code;
  exit_code = Run(*flags, console);
  console.out.flush();
  if (exit_code == kOk && !console.out.good()) {
    return FileFailed(absl::DataLossError("cannot write to standard output"), console);
  }
  return exit_code;
}

int CallFailed(const absl::Status& status, const Flags& flags, const client::Client& client,
               Console& console) {
  const bool unreached =
      (absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status)) && !client.connected();
  console.err << "awqctl: ";
  if (unreached) console.err << "cannot reach " << flags.address << ": ";
  console.err << absl::StatusCodeToString(status.code()) << ": " << Printable(status.message())
              << "\n";
  return unreached ? kCannotConnect : kCallFailed;
}

int FileFailed(const absl::Status& status, Console& console) {
  console.err << "awqctl: " << Printable(status.message()) << "\n";
  return kFileFailed;
}

int BadArguments(const absl::Status& status, Console& console) {
  console.err << "awqctl: " << Printable(status.message()) << "\n";
  return kBadArguments;
}

client::CallOptions Deadline(const Flags& flags, absl::Duration otherwise) {
  return {.timeout = flags.timeout.value_or(otherwise)};
}

absl::StatusOr<v1::WeightInfo> FindWeight(const Flags& flags, client::Client& client) {
  const auto model = client.GetModel(flags.model, Deadline(flags, absl::Seconds(60)));
  if (!model.ok()) return model.status();
  for (const v1::WeightInfo& weight : model->weights()) {
    if (weight.path() == flags.weight) return weight;
  }
  return absl::NotFoundError(absl::StrCat("model '", flags.model, "' has no weight '", flags.weight,
                                          "'; 'awqctl models ", flags.model, "' lists them"));
}

absl::StatusOr<std::string> SharedMemoryPrefix(const Flags& flags, client::Client& client) {
  const auto info = client.GetServerInfo(Deadline(flags, absl::Seconds(60)));
  if (!info.ok()) return info.status();
  if (!info->limits().shared_memory_prefix().empty()) return info->limits().shared_memory_prefix();
  return absl::FailedPreconditionError(
      "shared memory: the server takes none; it runs without --shared_memory_prefix");
}

absl::StatusOr<client::SharedMemory> CreateSharedMemory(const Flags& flags, client::Client& client,
                                                        int64_t bytes) {
  const auto prefix = SharedMemoryPrefix(flags, client);
  if (!prefix.ok()) return prefix.status();
  return client::SharedMemory::Create(*prefix, bytes);
}

std::string ToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string json;
  // Fails only for Any and well-known types, of which the API has none.
  const auto status = google::protobuf::util::MessageToJsonString(message, &json, options);
  return status.ok() ? json : "{}\n";
}

std::string PathName(v1::Path path) { return absl::AsciiStrToLower(v1::Path_Name(path)); }

}  // namespace awqd::awqctl
