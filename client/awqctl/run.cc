// awqctl from arguments to exit code, and functions that its subcommands share.
#include <exception>
#include <memory>
#include <utility>
#include <variant>

#include "absl/strings/ascii.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "client/awqctl/commands.h"
#include "google/protobuf/util/json_util.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/scheme.h"

namespace awqd::awqctl {
namespace {

// The payload of a status that has an exit code of its own.
constexpr char kExitCode[] = "awqctl/exit_code";

absl::Status WithExitCode(absl::Status status, int code) {
  status.SetPayload(kExitCode, absl::Cord(absl::StrCat(code)));
  return status;
}

// Prints why a command failed. `client` is null where it calls no server. Returns the exit code.
int PrintError(const absl::Status& status, const Flags& flags, const client::Client* client,
               Console& console) {
  int exit_code = client == nullptr ? kFileFailed : kCallFailed;
  console.err << "awqctl: ";
  if (const auto own = status.GetPayload(kExitCode)) {
    exit_code = *own == absl::StrCat(kBadArguments) ? kBadArguments : kFileFailed;
  } else if (client != nullptr) {
    if ((absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status)) && !client->connected()) {
      console.err << "cannot reach " << flags.address << ": ";
      exit_code = kCannotConnect;
    }
    console.err << absl::StatusCodeToString(status.code()) << ": ";
  }
  console.err << OneLine(status.message()) << "\n";
  return exit_code;
}

int Run(const Flags& flags, Console& console) {
  std::unique_ptr<client::Client> client;
  const auto run = [&]() -> absl::StatusOr<int> {
    // First: whatever address the environment names, no server is called.
    if (const auto* const local = std::get_if<LocalCommand*>(&flags.command)) {
      return (*local)(flags, console);
    }
    auto made = client::Client::Create({.address = flags.address,
                                        .max_reconnect_delay = absl::Milliseconds(250),
                                        .security = flags.security});
    if (!made.ok()) return BadArguments(made.status());
    client = *std::move(made);
    return std::get<Command*>(flags.command)(flags, *client, console);
  };
  absl::StatusOr<int> exit_code;
  try {
    exit_code = run();
  } catch (const std::exception& error) {
    // Memory that a file or an answer asked for and the machine does not have.
    exit_code = absl::ResourceExhaustedError(error.what());
  }
  return exit_code.ok() ? *exit_code : PrintError(exit_code.status(), flags, client.get(), console);
}

std::string Codes(const QuantizationScheme& scheme) {
  switch (scheme.code) {
    case CodeKind::kE2m1:
      return "4-bit floats (E2M1)";
    case CodeKind::kE4m3:
      return "8-bit floats (E4M3)";
    case CodeKind::kTable:
      return "4-bit indices into a table of 16 values";
    case CodeKind::kVector:
      return "indices of vectors in a codebook, with their scales";
    case CodeKind::kTrellis:
      return absl::StrCat(scheme.bits, "-bit codes of a trellis, whose columns are transformed");
    case CodeKind::kUnsigned:
      break;
  }
  return absl::StrCat(scheme.bits, "-bit codes");
}

// The weights [K, N] that share a scale.
std::string Block(const QuantizationScheme& scheme) {
  if (scheme.block_cols == 1 && scheme.block_rows == 0) return "each column";
  if (scheme.block_cols == 1) return absl::StrCat("each ", scheme.block_rows, " rows of a column");
  if (scheme.block_cols == 0 && scheme.block_rows == 0) return "all";
  return absl::StrCat("each block of ", scheme.block_rows, " x ", scheme.block_cols, " (0: all)");
}

// "4-bit codes, a scale (FP16) for each 128 rows of a column, stored zero points"
std::string Explained(const QuantizationScheme& scheme) {
  std::string out = Codes(scheme);
  if (scheme.scale_dtype) {
    absl::StrAppend(&out, ", a scale (", Name(*scheme.scale_dtype), ") for ", Block(scheme));
  }
  if (scheme.zero_kind == ZeroKind::kStored) absl::StrAppend(&out, ", stored zero points");
  if (scheme.real_zeros()) {
    absl::StrAppend(&out, ", real zeros (", Name(scheme.zero_dtype), ") ",
                    scheme.zero_kind == ZeroKind::kRealBefore ? "before" : "after", " the scale");
  } else if (scheme.zero_kind == ZeroKind::kConstant && scheme.is_integer()) {
    absl::StrAppend(&out, ", zero point ", scheme.zero);
  }
  if (scheme.outer == OuterKind::kColumn) out += ", a second scale for each column";
  if (scheme.outer == OuterKind::kOne) out += ", a second scale for all";
  return out;
}

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

int RunAwqctl(const std::vector<std::string>& args, Console& console) {
  int exit_code = kOk;
  const std::optional<Flags> flags = ParseFlags(args, console.out, console.err, exit_code);
  if (flags.has_value()) exit_code = Run(*flags, console);
  console.out.flush();
  if (exit_code != kOk || console.out.good()) return exit_code;
  console.err << "awqctl: cannot write to standard output\n";
  return kFileFailed;
}

absl::Status FileFailed(absl::Status status) {
  return WithExitCode(std::move(status), kFileFailed);
}

absl::Status BadArguments(absl::Status status) {
  return WithExitCode(std::move(status), kBadArguments);
}

client::CallOptions Deadline(const Flags& flags, absl::Duration otherwise) {
  return {.timeout = flags.timeout.value_or(otherwise)};
}

absl::StatusOr<ProductTarget> FindWeight(const Flags& flags, client::Client& client,
                                         const client::WeightName& wanted, bool stack) {
  AWQD_ASSIGN_OR_RETURN(const v1::GetModelResponse model,
                        client.GetModel(wanted.model, Deadline(flags)));
  for (const v1::WeightInfo& weight : model.weights()) {
    if (!stack && weight.path() == wanted.name) return ProductTarget{weight.k(), weight.n()};
  }
  for (const v1::StackInfo& one : model.stacks()) {
    if (!stack || one.path() != wanted.name) continue;
    if (!one.refused().empty()) return absl::FailedPreconditionError(one.refused());
    return ProductTarget{one.k(), one.n(), one.experts()};
  }
  return absl::NotFoundError(absl::StrCat("model '", wanted.model, "' has no ",
                                          stack ? "stack '" : "weight '", wanted.name,
                                          "'; 'awqctl models ", wanted.model, "' lists them"));
}

absl::StatusOr<std::string> SharedMemoryPrefix(const Flags& flags, client::Client& client) {
  AWQD_ASSIGN_OR_RETURN(const v1::GetServerInfoResponse info,
                        client.GetServerInfo(Deadline(flags)));
  if (!info.limits().shared_memory_prefix().empty()) return info.limits().shared_memory_prefix();
  return absl::FailedPreconditionError(
      "shared memory: the server accepts none, because it runs without --shared_memory_prefix");
}

absl::StatusOr<client::SharedMemory> CreateSharedMemory(const Flags& flags, client::Client& client,
                                                        int64_t bytes) {
  AWQD_ASSIGN_OR_RETURN(const std::string prefix, SharedMemoryPrefix(flags, client));
  return client::SharedMemory::Create(prefix, bytes);
}

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

std::string SchemeLines(const std::set<std::string>& schemes) {
  std::string lines;
  for (const std::string& text : schemes) {
    const absl::StatusOr<QuantizationScheme> scheme = ParseScheme(text);
    if (scheme.ok()) absl::StrAppend(&lines, text, ": ", Explained(*scheme), "\n");
  }
  return lines;
}

std::string PathName(v1::Path path) { return absl::AsciiStrToLower(v1::Path_Name(path)); }

}  // namespace awqd::awqctl
