// awqctl from arguments to exit code, and what its subcommands share.
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "client/awqctl/commands.h"
#include "google/protobuf/util/json_util.h"
#include "kernels/base/text.h"

namespace awqd::awqctl {
namespace {

int Run(const Flags& flags, Console& console) {
  // First: whatever address the environment names, no server is asked.
  if (flags.local_command != nullptr) return flags.local_command(flags, console);
  absl::StatusOr<std::unique_ptr<client::Client>> client =
      client::Client::Create({.address = flags.address,
                              .max_reconnect_delay = absl::Milliseconds(250),
                              .security = flags.security});
  if (!client.ok()) return BadArguments(client.status(), console);
  return flags.command(flags, **client, console);
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
  console.err << absl::StatusCodeToString(status.code()) << ": " << OneLine(status.message())
              << "\n";
  return unreached ? kCannotConnect : kCallFailed;
}

int FileFailed(const absl::Status& status, Console& console) {
  console.err << "awqctl: " << OneLine(status.message()) << "\n";
  return kFileFailed;
}

int BadArguments(const absl::Status& status, Console& console) {
  console.err << "awqctl: " << OneLine(status.message()) << "\n";
  return kBadArguments;
}

client::CallOptions Deadline(const Flags& flags, absl::Duration otherwise) {
  return {.timeout = flags.timeout.value_or(otherwise)};
}

absl::StatusOr<v1::WeightInfo> FindWeight(const Flags& flags, client::Client& client,
                                          const client::WeightName& wanted) {
  const auto model = client.GetModel(wanted.model, Deadline(flags, absl::Seconds(60)));
  if (!model.ok()) return model.status();
  for (const v1::WeightInfo& weight : model->weights()) {
    if (weight.path() == wanted.name) return weight;
  }
  return absl::NotFoundError(absl::StrCat("model '", wanted.model, "' has no weight '", wanted.name,
                                          "'; 'awqctl models ", wanted.model, "' lists them"));
}

absl::StatusOr<std::string> SharedMemoryPrefix(const Flags& flags, client::Client& client) {
  const auto info = client.GetServerInfo(Deadline(flags, absl::Seconds(60)));
  if (!info.ok()) return info.status();
  if (!info->limits().shared_memory_prefix().empty()) return info->limits().shared_memory_prefix();
  return absl::FailedPreconditionError(
      "shared memory: the server accepts none, because it runs without --shared_memory_prefix");
}

absl::StatusOr<client::SharedMemory> CreateSharedMemory(const Flags& flags, client::Client& client,
                                                        int64_t bytes) {
  const auto prefix = SharedMemoryPrefix(flags, client);
  if (!prefix.ok()) return prefix.status();
  return client::SharedMemory::Create(*prefix, bytes);
}

namespace {

// Fields with their default values too. Protocol Buffers 26 gave the option another name.
template <typename Options>
void PrintAllFields(Options& options) {
  if constexpr (requires { options.always_print_fields_with_no_presence; }) {
    options.always_print_fields_with_no_presence = true;
  } else {
    options.always_print_primitive_fields = true;
  }
}

}  // namespace

std::string ToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  PrintAllFields(options);
  options.preserve_proto_field_names = true;
  std::string json;
  // Fails only for Any and well-known types, of which the API has none.
  const auto status = google::protobuf::util::MessageToJsonString(message, &json, options);
  return status.ok() ? json : "{}\n";
}

std::string PathName(v1::Path path) { return absl::AsciiStrToLower(v1::Path_Name(path)); }

}  // namespace awqd::awqctl
