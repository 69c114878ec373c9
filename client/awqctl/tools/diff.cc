// awqctl diff.
#include "client/tools/diff.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/awqctl/commands.h"
#include "client/awqctl/progress.h"
#include "client/awqctl/tools/output.h"

namespace awqd::awqctl {
namespace {

std::string Count(const std::optional<int64_t>& count) {
  return count ? absl::StrCat(*count) : "-";
}

std::string Worst(const tools::LinearDifference& linear) {
  std::string out;
  for (const tools::DifferentElement& element : linear.worst) {
    absl::StrAppendFormat(&out, "%s[%d, %d] %.6g / %.6g", out.empty() ? "" : "; ", element.k,
                          element.n, element.a, element.b);
  }
  return out;
}

void PrintNames(const char* what, const std::vector<std::string>& names, Console& console) {
  for (const std::string& name : names) console.out << what << Printable(name) << "\n";
}

void Print(const tools::FolderDifference& difference, Console& console) {
  Table table({"LINEAR", "A", "B", "RELATIVE", "LARGEST", "ELEMENTS", "CODES", "ZEROS", "SCALES",
               "BIAS", "WORST [K, N] A / B"});
  for (const tools::LinearDifference& linear : difference.linears) {
    if (!linear.error.empty()) continue;
    table.Add({linear.path, linear.a, linear.b, absl::StrFormat("%.3g", linear.relative),
               absl::StrFormat("%.3g", linear.largest),
               absl::StrFormat("%d of %d", linear.different, linear.k * linear.n),
               Count(linear.different_codes), Count(linear.different_zeros),
               Count(linear.different_scales), absl::StrCat(linear.different_bias), Worst(linear)});
  }
  console.out << table.Text();
  for (const tools::LinearDifference& linear : difference.linears) {
    if (linear.error.empty()) continue;
    console.out << Printable(absl::StrCat("cannot compare ", linear.path, ": ", linear.error))
                << "\n";
  }
  PrintNames("tensor differs: ", difference.different_tensors, console);
  PrintNames("tensor only in A: ", difference.only_in_a, console);
  PrintNames("tensor only in B: ", difference.only_in_b, console);
  console.out << difference.same_tensors << " other tensors are the same\n";
}

}  // namespace

int Diff(const Flags& flags, Console& console) {
  absl::StatusOr<tools::FolderDifference> difference;
  {
    Progress progress(console, !flags.quiet);
    difference = tools::Diff(flags.tool.folder, flags.tool.other, flags.tool.worst,
                             [&](int64_t done, int64_t total) { progress.Update(done, total); });
  }
  if (!difference.ok()) return FileFailed(difference.status(), console);
  if (flags.json) {
    PrintJson(tools::ToJson(*difference), console);
  } else {
    Print(*difference, console);
  }
  if (difference->same()) return kOk;
  console.err << "awqctl: " << Printable(flags.tool.folder) << " differs from "
              << Printable(flags.tool.other) << "\n";
  return kDiffers;
}

}  // namespace awqd::awqctl
