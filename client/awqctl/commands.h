// The subcommands of awqctl. Each writes its result to the console's `out` and returns an exit
// code, having written one line to `err` when it is not kOk.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "client/awqctl/flags.h"
#include "client/awqd_client.h"
#include "client/shared_memory.h"
#include "google/protobuf/message.h"

namespace awqd::awqctl {

int Status(const Flags& flags, client::Client& client, Console& console);
int Models(const Flags& flags, client::Client& client, Console& console);
int Load(const Flags& flags, client::Client& client, Console& console);
int Unload(const Flags& flags, client::Client& client, Console& console);
int Kernels(const Flags& flags, client::Client& client, Console& console);
int Dequantize(const Flags& flags, client::Client& client, Console& console);
int Matmul(const Flags& flags, client::Client& client, Console& console);
int Mlp(const Flags& flags, client::Client& client, Console& console);
int QuantizeKv(const Flags& flags, client::Client& client, Console& console);
int Top(const Flags& flags, client::Client& client, Console& console);
int Healthcheck(const Flags& flags, client::Client& client, Console& console);
int Bench(const Flags& flags, client::Client& client, Console& console);

// These ask no server.
int Compare(const Flags& flags, Console& console);
int Inspect(const Flags& flags, Console& console);
int Diff(const Flags& flags, Console& console);
int Quantize(const Flags& flags, Console& console);
int Convert(const Flags& flags, Console& console);
int Token(const Flags& flags, Console& console);

// Parses, connects and runs. The whole of main, so that tests can call it.
int RunAwqctl(const std::vector<std::string>& args, Console& console);

// One line on `err`, and the exit code that fits.
int CallFailed(const absl::Status& status, const Flags& flags, const client::Client& client,
               Console& console);
int FileFailed(const absl::Status& status, Console& console);
int BadArguments(const absl::Status& status, Console& console);

// The command's deadline: what --timeout says, or `otherwise`.
client::CallOptions Deadline(const Flags& flags, absl::Duration otherwise);

// A weight as its model's GetModel tells it.
absl::StatusOr<v1::WeightInfo> FindWeight(const Flags& flags, client::Client& client,
                                          const client::WeightName& wanted);

// For --shared_memory: the prefix that the server asks for, FAILED_PRECONDITION when it takes none,
// and an object with it.
absl::StatusOr<std::string> SharedMemoryPrefix(const Flags& flags, client::Client& client);
absl::StatusOr<client::SharedMemory> CreateSharedMemory(const Flags& flags, client::Client& client,
                                                        int64_t bytes);

// For quantize and convert, a tools::Guard: a signal that ends the process removes the path.
std::shared_ptr<void> RemovedOnSignal(const std::string& path);

// Protocol Buffers' JSON mapping with the names of the .proto files and no field left out.
std::string ToJson(const google::protobuf::Message& message);

// "fused", "dequantize" or "auto".
std::string PathName(v1::Path path);

}  // namespace awqd::awqctl
