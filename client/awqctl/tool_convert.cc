// awqctl quantize and convert: a model folder is written anew.
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/awqctl/commands.h"
#include "client/awqctl/progress.h"
#include "client/remove_on_signal.h"
#include "client/tools/convert.h"
#include "client/tools/quantize.h"
#include "kernels/base/text.h"

namespace awqd::awqctl {
namespace {

// Tensors and files that were copied as they are, and files that were not.
void PrintCarried(const tools::Carried& carried, Console& console) {
  for (const std::string& name : carried.left_out) {
    console.out << "not copied: " << OneLine(name) << "\n";
  }
  console.out << "copied: " << carried.tensors << " tensors, " << FormatBytes(carried.tensor_bytes)
              << "; " << carried.files.size() << " files\n";
}

// Warns of linears of a GPTQ checkpoint with a zero point of 0. Prints nothing for none.
void PrintZeroNote(int64_t linears, Console& console) {
  if (linears == 0) return;
  console.out << "note: " << linears
              << " linears have a zero point of 0, which GPTQModel and awqd read as it is, and "
                 "AutoGPTQ's own kernels as 2^bits\n";
}

void PrintVerified(const tools::Verification& verified, Console& console) {
  console.out << "verified: " << verified.elements - verified.rounded << " elements of "
              << verified.linears << " linears are the same, bit for bit in FP32";
  if (verified.rounded > 0) {
    console.out << ", " << verified.rounded << " were rounded once";
  }
  console.out << "; " << verified.biases << " elements of biases, " << verified.tensors
              << " other tensors (" << FormatBytes(verified.tensor_bytes) << ") and "
              << verified.files << " files (" << FormatBytes(verified.file_bytes)
              << ") are the same\n";
}

void Print(const Flags& flags, const tools::Conversion& conversion, Console& console) {
  PrintCarried(conversion.carried, console);
  int64_t slices = 0, zeros = 0;
  for (const tools::ConvertedLinear& linear : conversion.linears) {
    slices += linear.slice ? 1 : 0;
    zeros += linear.zero_at_0 ? 1 : 0;
  }
  if (slices > 0) {
    console.out << "note: " << slices
                << " experts that shared tensors now have tensors of their own\n";
  }
  if (conversion.activations > 0) {
    console.out << "note: " << conversion.activations
                << " linears declare quantised activations, which the new format cannot say\n";
  }
  if (conversion.to == "gptq") PrintZeroNote(zeros, console);
  if (!conversion.dtype.empty() && conversion.dtype != "F32") {
    console.out << "note: every element was rounded once, to " << conversion.dtype
                << "; --dtype fp32 keeps every bit\n";
  }
  if (conversion.verified) PrintVerified(*conversion.verified, console);
  console.out << OneLine(flags.tool.output) << ": " << conversion.linears.size() << " linears from "
              << conversion.from << " to " << conversion.to << ", "
              << FormatBytes(conversion.bytes_before) << " became "
              << FormatBytes(conversion.bytes_after) << "\n";
}

void Print(const Flags& flags, const tools::Quantization& quantization, Console& console) {
  Table table({"LINEAR", "DESCRIPTION", "K", "N", "RELATIVE ERROR", "LARGEST"});
  for (const tools::QuantizedLinear& linear : quantization.linears) {
    table.AddRow({linear.path, linear.scheme, absl::StrCat(linear.k), absl::StrCat(linear.n),
                  absl::StrFormat("%.4f", linear.relative),
                  absl::StrFormat("%.3g", linear.largest)});
  }
  console.out << table.Text();
  for (const tools::DenseLinear& linear : quantization.dense) {
    console.out << OneLine(absl::StrCat("stays dense: ", linear.path, ": ", linear.why)) << "\n";
  }
  PrintCarried(quantization.carried, console);
  int64_t zeros = 0;
  for (const tools::QuantizedLinear& linear : quantization.linears) {
    zeros += linear.zero_at_0 ? 1 : 0;
  }
  if (flags.tool.to == "gptq") PrintZeroNote(zeros, console);
  console.out << OneLine(flags.tool.output) << ": " << quantization.linears.size() << " linears, "
              << FormatBytes(quantization.bytes_before) << " became "
              << FormatBytes(quantization.bytes_after) << "\n";
}

}  // namespace

std::shared_ptr<void> RemovedOnSignal(const std::string& path) {
  return std::make_shared<client::RemoveOnSignal>(path);
}

int Convert(const Flags& flags, Console& console) {
  absl::StatusOr<tools::Conversion> conversion;
  {
    Progress progress(console, !flags.quiet);
    conversion = tools::Convert({.folder = flags.tool.folder,
                                 .output = flags.tool.output,
                                 .target = tools::TargetNamed(flags.tool.to),
                                 .dtype = flags.tool.dtype,
                                 .verify = flags.tool.verify,
                                 .guard = RemovedOnSignal},
                                [&](int64_t done, int64_t total) { progress.Update(done, total); });
  }
  if (!conversion.ok()) return FileFailed(conversion.status(), console);
  if (flags.json) {
    PrintJson(tools::ToJson(*conversion), console);
  } else {
    Print(flags, *conversion, console);
  }
  return kOk;
}

int Quantize(const Flags& flags, Console& console) {
  const tools::Target* const target = tools::TargetNamed(flags.tool.to);
  absl::StatusOr<tools::Quantization> quantization;
  {
    Progress progress(console, !flags.quiet);
    quantization =
        tools::Quantize({.folder = flags.tool.folder,
                         .output = flags.tool.output,
                         .target = target,
                         .rtn = {.bits = flags.tool.bits,
                                 .group_size = flags.tool.group_size,
                                 .symmetric = flags.tool.symmetric || !target->asymmetric,
                                 .search = flags.tool.search},
                         .leave_out = flags.tool.leave_out,
                         .guard = RemovedOnSignal},
                        [&](int64_t done, int64_t total) { progress.Update(done, total); });
  }
  if (!quantization.ok()) return FileFailed(quantization.status(), console);
  if (flags.json) {
    PrintJson(tools::ToJson(*quantization), console);
  } else {
    Print(flags, *quantization, console);
  }
  return kOk;
}

}  // namespace awqd::awqctl
