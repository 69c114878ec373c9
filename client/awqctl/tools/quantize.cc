// awqctl quantize.
#include "client/tools/quantize.h"

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/awqctl/commands.h"
#include "client/awqctl/progress.h"
#include "client/awqctl/tools/output.h"

namespace awqd::awqctl {
namespace {

void Print(const Flags& flags, const tools::Quantization& quantization, Console& console) {
  Table table({"LINEAR", "DESCRIPTION", "K", "N", "RELATIVE ERROR", "LARGEST"});
  for (const tools::QuantizedLinear& linear : quantization.linears) {
    table.Add({linear.path, linear.description, absl::StrCat(linear.k), absl::StrCat(linear.n),
               absl::StrFormat("%.4f", linear.relative), absl::StrFormat("%.3g", linear.largest)});
  }
  console.out << table.Text();
  for (const tools::DenseLinear& linear : quantization.dense) {
    console.out << Printable(absl::StrCat("stays dense: ", linear.path, ": ", linear.why)) << "\n";
  }
  PrintCarried(quantization.carried, console);
  int64_t zeros = 0;
  for (const tools::QuantizedLinear& linear : quantization.linears) {
    zeros += linear.zero_at_0 ? 1 : 0;
  }
  if (flags.tool.to == "gptq") PrintZeroNote(zeros, console);
  console.out << Printable(flags.tool.output) << ": " << quantization.linears.size() << " linears, "
              << Bytes(quantization.bytes_before) << " became " << Bytes(quantization.bytes_after)
              << "\n";
}

}  // namespace

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
