// awqctl inspect and diff: model folders are read and told about.
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/awqctl/commands.h"
#include "client/awqctl/progress.h"
#include "client/tools/diff.h"
#include "client/tools/inspect.h"
#include "kernels/base/text.h"

namespace awqd::awqctl {
namespace {

// "layers.*.norm.weight": layers that are alike are one line.
std::string Collapsed(const std::string& name) {
  std::vector<std::string> parts = absl::StrSplit(name, '.');
  for (std::string& part : parts) {
    const bool number = !part.empty() && part.find_first_not_of("0123456789") == part.npos;
    if (number) part = "*";
  }
  return absl::StrJoin(parts, ".");
}

std::string Parts(const tools::InspectedLinear& linear) {
  std::vector<absl::string_view> parts;
  if (linear.order) parts.push_back("order");
  if (linear.factor) parts.push_back("factor");
  if (linear.bias) parts.push_back("bias");
  if (!linear.codes_read) parts.push_back("codes not read");
  return absl::StrJoin(parts, " ");
}

void PrintLinears(const tools::Inspection& inspection, Console& console) {
  Table table({"LINEAR", "DESCRIPTION", "K", "N", "SIZE", "BITS/WEIGHT", "WITH"});
  for (const tools::InspectedLinear& linear : inspection.linears) {
    if (linear.error.empty()) {
      table.AddRow({linear.path, linear.scheme, absl::StrCat(linear.k), absl::StrCat(linear.n),
                    FormatBytes(linear.bytes), absl::StrFormat("%.3f", linear.bits_per_weight()),
                    Parts(linear)});
    } else {
      table.AddRow({linear.path, "DOES NOT LOAD", "", "", FormatBytes(linear.bytes), "", ""});
    }
  }
  console.out << table.Text();
  for (const tools::InspectedLinear& linear : inspection.linears) {
    if (linear.error.empty()) continue;
    console.out << OneLine(absl::StrCat("does not load: ", linear.path, ": ", linear.error))
                << "\n";
  }
}

void PrintNotQuantised(const tools::Inspection& inspection, Console& console) {
  struct Alike {
    int count = 0;
    int64_t bytes = 0;
  };
  // By name, dtype, shape and reason.
  std::map<std::vector<std::string>, Alike> rows;
  for (const tools::InspectedTensor& tensor : inspection.not_quantised) {
    Alike& alike =
        rows[{Collapsed(tensor.name), tensor.dtype,
              absl::StrCat("[", absl::StrJoin(tensor.shape, ", "), "]"), Collapsed(tensor.why)}];
    ++alike.count;
    alike.bytes += tensor.bytes;
  }
  if (rows.empty()) return;
  Table table({"NOT QUANTISED", "TENSORS", "DTYPE", "SHAPE", "SIZE", "WHY"});
  for (const auto& [key, alike] : rows) {
    table.AddRow(
        {key[0], absl::StrCat(alike.count), key[1], key[2], FormatBytes(alike.bytes), key[3]});
  }
  console.out << "\n" << table.Text();
}

void Print(const tools::Inspection& inspection, Console& console) {
  int64_t bytes = 0, weights = 0;
  for (const tools::InspectedLinear& linear : inspection.linears) {
    bytes += linear.bytes;
    weights += linear.k * linear.n;
  }
  console.out << OneLine(inspection.path) << ": ";
  if (!inspection.format.empty()) {
    console.out << "format " << inspection.format << ", " << inspection.linears.size()
                << " linears, " << FormatBytes(bytes) << ", "
                << absl::StrFormat("%.3f bits per weight; ",
                                   weights == 0 ? 0 : 8.0 * bytes / static_cast<double>(weights));
  }
  console.out << FormatBytes(inspection.total_bytes) << " in all\n";
  if (!inspection.note.empty()) console.out << "note: " << OneLine(inspection.note) << "\n";
  if (!inspection.error.empty()) {
    console.out << "does not load: " << OneLine(inspection.error) << "\n";
  } else {
    console.out << "\n";
    PrintLinears(inspection, console);
  }
  PrintNotQuantised(inspection, console);
  if (inspection.other_tensors > 0) {
    console.out << "and " << inspection.other_tensors << " tensors of fewer than two dimensions, "
                << FormatBytes(inspection.other_bytes) << "\n";
  }
}

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
  for (const std::string& name : names) console.out << what << OneLine(name) << "\n";
}

void Print(const tools::FolderDifference& difference, Console& console) {
  Table table({"LINEAR", "A", "B", "RELATIVE", "LARGEST", "ELEMENTS", "CODES", "ZEROS", "SCALES",
               "BIAS", "WORST [K, N] A / B"});
  for (const tools::LinearDifference& linear : difference.linears) {
    if (!linear.error.empty()) continue;
    table.AddRow({linear.path, linear.a, linear.b, absl::StrFormat("%.3g", linear.relative),
                  absl::StrFormat("%.3g", linear.largest),
                  absl::StrFormat("%d of %d", linear.different, linear.k * linear.n),
                  Count(linear.different_codes), Count(linear.different_zeros),
                  Count(linear.different_scales), absl::StrCat(linear.different_bias),
                  Worst(linear)});
  }
  console.out << table.Text();
  for (const tools::LinearDifference& linear : difference.linears) {
    if (linear.error.empty()) continue;
    console.out << OneLine(absl::StrCat("cannot compare ", linear.path, ": ", linear.error))
                << "\n";
  }
  PrintNames("tensor differs: ", difference.different_tensors, console);
  PrintNames("tensor only in A: ", difference.only_in_a, console);
  PrintNames("tensor only in B: ", difference.only_in_b, console);
  console.out << difference.same_tensors << " other tensors are the same\n";
}

}  // namespace

int Inspect(const Flags& flags, Console& console) {
  absl::StatusOr<tools::Inspection> inspection;
  {
    Progress progress(console, !flags.quiet);
    inspection = tools::Inspect(flags.tool.folder,
                                [&](int64_t done, int64_t total) { progress.Update(done, total); });
  }
  if (!inspection.ok()) return FileFailed(inspection.status(), console);
  if (flags.json) {
    PrintJson(tools::ToJson(*inspection), console);
  } else {
    Print(*inspection, console);
  }
  if (inspection->loads()) return kOk;
  console.err << "awqctl: " << OneLine(flags.tool.folder) << " does not load as a whole\n";
  return kDoesNotLoad;
}

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
  console.err << "awqctl: " << OneLine(flags.tool.folder) << " differs from "
              << OneLine(flags.tool.other) << "\n";
  return kDiffers;
}

}  // namespace awqd::awqctl
