// awqctl convert.
#include "client/tools/convert.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "client/awqctl/commands.h"
#include "client/awqctl/progress.h"
#include "client/awqctl/tools/output.h"

namespace awqd::awqctl {
namespace {

void PrintVerified(const tools::Verification& verified, Console& console) {
  console.out << "verified: " << verified.elements - verified.rounded << " elements of "
              << verified.linears << " linears are the same, bit for bit in FP32";
  if (verified.rounded > 0) {
    console.out << ", " << verified.rounded << " are the one rounding of what they were";
  }
  console.out << "; " << verified.biases << " elements of biases, " << verified.tensors
              << " other tensors (" << Bytes(verified.tensor_bytes) << ") and " << verified.files
              << " files (" << Bytes(verified.file_bytes) << ") are the same\n";
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
                << " experts that shared tensors have tensors of their own now\n";
  }
  if (conversion.activations > 0) {
    console.out << "note: that activations are to be quantised, which " << conversion.activations
                << " linears declared, is not carried along\n";
  }
  if (conversion.to == "gptq") PrintZeroNote(zeros, console);
  if (!conversion.dtype.empty() && conversion.dtype != "F32") {
    console.out << "note: every element was rounded once, to " << conversion.dtype
                << "; --dtype fp32 keeps every bit\n";
  }
  if (conversion.verified) PrintVerified(*conversion.verified, console);
  console.out << Printable(flags.tool.output) << ": " << conversion.linears.size()
              << " linears from " << conversion.from << " to " << conversion.to << ", "
              << Bytes(conversion.bytes_before) << " became " << Bytes(conversion.bytes_after)
              << "\n";
}

}  // namespace

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

}  // namespace awqd::awqctl
