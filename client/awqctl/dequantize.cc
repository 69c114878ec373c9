// awqctl dequantize: the stream to a file, one block in memory at a time, or shared memory to a
// file.
#include <memory>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/awqctl/commands.h"
#include "client/files/tensor_file.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "nlohmann/json.hpp"

namespace awqd::awqctl {
namespace {

struct Download {
  std::unique_ptr<client::TensorFileWriter> writer;
  std::vector<int64_t> shape;
  client::DType dtype = v1::DTYPE_UNSPECIFIED;
  int64_t bytes = 0;
  absl::Status file_error;  // told apart from the server's errors
};

absl::Status Store(const Flags& flags, client::DequantizeBlock block, Download& download,
                   Progress& progress) {
  if (download.writer == nullptr) {
    download.shape = {block.total_rows, block.total_columns};
    download.dtype = block.values.dtype;
    auto writer = client::TensorFileWriter::Create(flags.output, flags.weight, download.dtype,
                                                   download.shape);
    if (!writer.ok()) return download.file_error = writer.status();
    download.writer = *std::move(writer);
  }
  download.file_error = download.writer->Append(block.values.bytes);
  download.bytes += static_cast<int64_t>(block.values.bytes.size());
  progress(download.bytes, block.total_rows * block.total_columns * client::SizeOf(download.dtype));
  return download.file_error;
}

// The whole answer by way of shared memory, stored as one block.
absl::StatusOr<v1::Execution> DequantizeShared(const Flags& flags, client::DequantizeCall call,
                                               client::Client& client, Download& download,
                                               Progress& progress) {
  AWQD_ASSIGN_OR_RETURN(const auto weight,
                        FindWeight(flags, client, {flags.model, flags.weight}, false));
  const int64_t row_end = call.row_end == 0 ? weight.k : call.row_end;
  const int64_t column_end = call.column_end == 0 ? weight.n : call.column_end;
  if (call.row_begin > row_end || row_end > weight.k || call.column_begin > column_end ||
      column_end > weight.n) {
    return Invalid("rows [", call.row_begin, ", ", row_end, ") and columns [", call.column_begin,
                   ", ", column_end, "): expected a part of [", weight.k, ", ", weight.n, "]");
  }
  const int64_t rows = row_end - call.row_begin;
  const int64_t columns = column_end - call.column_begin;
  const int64_t bytes = rows * columns * client::SizeOf(call.output_dtype);
  AWQD_ASSIGN_OR_RETURN(auto memory, CreateSharedMemory(flags, client, bytes));
  call.shared_output = memory.Range(0, bytes);
  AWQD_ASSIGN_OR_RETURN(auto result,
                        client.Dequantize(call, Deadline(flags, absl::InfiniteDuration())));
  client::Tensor& output = result.output;
  output.bytes.assign(memory.data(), static_cast<size_t>(bytes));
  AWQD_RETURN_IF_ERROR(output.Check());
  AWQD_RETURN_IF_ERROR(Store(flags, {0, std::move(output), rows, columns}, download, progress));
  return result.execution;
}

void Print(const Flags& flags, const Download& download, const v1::Execution& execution,
           absl::Duration elapsed, Console& console) {
  const double seconds = absl::ToDoubleSeconds(elapsed);
  if (flags.json) {
    nlohmann::ordered_json json = {{"output", flags.output},
                                   {"dtype", std::string(client::Name(download.dtype))},
                                   {"shape", download.shape},
                                   {"bytes", download.bytes},
                                   {"kernel", execution.kernel()},
                                   {"device", execution.device()},
                                   {"compute_us", execution.compute_us()},
                                   {"elapsed_s", seconds}};
    PrintJson(json, console);
    return;
  }
  console.out << absl::StrFormat("%s: %s %s, %s, kernel %s on %s, %.3f s\n", flags.output,
                                 client::Name(download.dtype), client::ShapeString(download.shape),
                                 FormatBytes(download.bytes), OneLine(execution.kernel()),
                                 OneLine(execution.device()), seconds);
}

}  // namespace

absl::StatusOr<int> Dequantize(const Flags& flags, client::Client& client, Console& console) {
  const client::DType dtype = flags.dtype == v1::DTYPE_UNSPECIFIED ? v1::FP16 : flags.dtype;
  // Before the server is called.
  const auto format = client::TensorFileFormatOf(flags.output, dtype);
  if (!format.ok()) return BadArguments(format.status());

  const client::DequantizeCall call = {.weight = client::WeightName{flags.model, flags.weight},
                                       .output_dtype = dtype,
                                       .row_begin = flags.row_begin,
                                       .row_end = flags.row_end,
                                       .column_begin = flags.column_begin,
                                       .column_end = flags.column_end};
  Download download;
  const absl::Time start = absl::Now();
  absl::StatusOr<v1::Execution> execution;
  {
    Progress progress(console, !flags.quiet);
    const auto store = [&](client::DequantizeBlock block) {
      return Store(flags, std::move(block), download, progress);
    };
    execution = flags.shared_memory ? DequantizeShared(flags, call, client, download, progress)
                                    : client.DequantizeBlocks(
                                          call, store, Deadline(flags, absl::InfiniteDuration()));
  }
  if (!download.file_error.ok()) return FileFailed(download.file_error);
  if (!execution.ok()) return execution.status();
  AWQD_RETURN_IF_ERROR(FileFailed(download.writer->Commit()));
  Print(flags, download, *execution, absl::Now() - start, console);
  return kOk;
}

}  // namespace awqd::awqctl
