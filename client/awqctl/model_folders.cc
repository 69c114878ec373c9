// awqctl inspect, diff, quantize, convert and merge: model folders are read, told about and written anew.
#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/awqctl/commands.h"
#include "client/remove_on_signal.h"
#include "client/tools/convert.h"
#include "client/tools/diff.h"
#include "client/tools/inspect.h"
#include "client/tools/merge.h"
#include "client/tools/quantize.h"
#include "kernels/base/status.h"
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
  std::vector<std::string> parts;
  if (linear.order) parts.emplace_back("order");
  if (linear.factor) parts.emplace_back("factor");
  if (linear.hadamard > 0) parts.push_back(absl::StrCat("hadamard", linear.hadamard));
  if (linear.bias) parts.emplace_back("bias");
  if (!linear.codes_read) parts.emplace_back("codes not read");
  return absl::StrJoin(parts, " ");
}

void PrintLinears(const tools::Inspection& inspection, Console& console) {
  Table table({"LINEAR", "SCHEME", "K", "N", "SIZE", "BITS/WEIGHT", "WITH"});
  std::set<std::string> schemes;
  for (const tools::InspectedLinear& linear : inspection.linears) {
    schemes.insert(linear.scheme);
    if (linear.error.empty()) {
      table.AddRow({linear.path, linear.scheme, absl::StrCat(linear.k), absl::StrCat(linear.n),
                    FormatBytes(linear.bytes), absl::StrFormat("%.3f", linear.bits_per_weight()),
                    Parts(linear)});
    } else {
      table.AddRow({linear.path, "DOES NOT LOAD", "", "", FormatBytes(linear.bytes), "", ""});
    }
  }
  for (const auto& [path, reason] : inspection.unserved) {
    table.AddRow({path, "DOES NOT LOAD", "", "", "", "", ""});
  }
  table.Fold();
  console.out << table.Text(console) << "\n" << Wrapped(SchemeLines(schemes), console);
  for (const auto& [path, reason] : inspection.unserved) {
    console.out << OneLine(absl::StrCat("does not load: ", path, ": ", reason.message())) << "\n";
  }
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
  console.out << "\n" << table.Text(console);
}

void Print(const Flags&, const tools::Inspection& inspection, Console& console) {
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

// A sum is unknown where a part of it is.
void AddCount(const std::optional<int64_t>& count, std::optional<int64_t>& sum) {
  if (sum) sum = count ? std::optional(*sum + *count) : std::nullopt;
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

void Print(const Flags&, const tools::FolderDifference& difference, Console& console) {
  Table table({"LINEAR", "A", "B", "RELATIVE", "LARGEST", "ELEMENTS", "CODES", "ZEROS", "SCALES",
               "BIAS", "WORST [K, N] A / B"});
  // The sum over all linears that were compared.
  tools::LinearDifference sum;
  sum.path = "all";
  sum.different_codes = sum.different_zeros = sum.different_scales = 0;
  int64_t elements = 0;
  std::set<std::string> schemes;
  const auto add = [&](const tools::LinearDifference& linear, int64_t count) {
    table.AddRow({linear.path, linear.a, linear.b, absl::StrFormat("%.3g", linear.norms.relative()),
                  absl::StrFormat("%.3g", linear.largest),
                  absl::StrFormat("%d of %d", linear.different, count),
                  Count(linear.different_codes), Count(linear.different_zeros),
                  Count(linear.different_scales), absl::StrCat(linear.different_bias),
                  Worst(linear)});
  };
  for (const tools::LinearDifference& linear : difference.linears) {
    if (!linear.error.empty()) continue;
    add(linear, linear.k * linear.n);
    schemes.insert({linear.a, linear.b});
    elements += linear.k * linear.n;
    sum.norms.Add(linear.norms);
    sum.largest = std::max(sum.largest, linear.largest);
    sum.different += linear.different;
    sum.different_bias += linear.different_bias;
    AddCount(linear.different_codes, sum.different_codes);
    AddCount(linear.different_zeros, sum.different_zeros);
    AddCount(linear.different_scales, sum.different_scales);
  }
  if (elements > 0) add(sum, elements);
  console.out << table.Text(console) << "\n" << Wrapped(SchemeLines(schemes), console);
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

// Tensors and files that were copied as they are, and files that were not.
void PrintCarried(const tools::Carried& carried, Console& console) {
  for (const std::string& name : carried.left_out) {
    console.out << "not copied: " << OneLine(name) << "\n";
  }
  console.out << "copied: " << carried.tensors << " tensors, " << FormatBytes(carried.tensor_bytes)
              << "; " << carried.files.size() << " files\n";
}

// Warns of linears of a GPTQ checkpoint with a zero point of 0. Prints nothing for none.
template <typename Linear>
void PrintZeroNote(const std::vector<Linear>& linears, Console& console) {
  const auto count = absl::c_count_if(linears, [](const Linear& one) { return one.zero_at_0; });
  if (count == 0) return;
  console.out << "note: " << count
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
  const auto slices = absl::c_count_if(
      conversion.linears, [](const tools::ConvertedLinear& linear) { return linear.slice; });
  if (slices > 0) {
    console.out << "note: " << slices
                << " experts that shared tensors now have tensors of their own\n";
  }
  if (conversion.activations > 0) {
    console.out << "note: " << conversion.activations
                << " linears declare quantised activations, which the new format cannot say\n";
  }
  if (conversion.to == "gptq") PrintZeroNote(conversion.linears, console);
  const auto dense = absl::c_count_if(
      conversion.linears, [](const tools::ConvertedLinear& linear) { return linear.dense; });
  if (dense > 0 && conversion.dtype != "F32") {
    console.out << "note: every element of " << dense << " linears was rounded once, to "
                << conversion.dtype << "; --dtype fp32 keeps every bit\n";
  }
  if (conversion.verified) PrintVerified(*conversion.verified, console);
  console.out << OneLine(flags.tool.output) << ": " << conversion.linears.size() << " linears from "
              << conversion.from << " to " << conversion.to << ", "
              << FormatBytes(conversion.bytes_before) << " became "
              << FormatBytes(conversion.bytes_after) << "\n";
}

// Prints the error that rounding made in each linear.
void PrintErrors(const std::vector<tools::QuantizedLinear>& linears, Console& console) {
  Table table({"LINEAR", "SCHEME", "K", "N", "RELATIVE ERROR", "LARGEST"});
  std::set<std::string> schemes;
  tools::SquaredNorms norms;
  double largest = 0;
  for (const tools::QuantizedLinear& linear : linears) {
    schemes.insert(linear.scheme);
    norms.Add(linear.norms);
    largest = std::max(largest, linear.largest);
    table.AddRow({linear.path, linear.scheme, absl::StrCat(linear.k), absl::StrCat(linear.n),
                  absl::StrFormat("%.4g", linear.norms.relative()),
                  absl::StrFormat("%.3g", linear.largest)});
  }
  table.AddRow({"all", "", "", "", absl::StrFormat("%.4g", norms.relative()),
                absl::StrFormat("%.3g", largest)});
  console.out << table.Text(console) << "\n" << Wrapped(SchemeLines(schemes), console);
}

void Print(const Flags& flags, const tools::Merged& merged, Console& console) {
  PrintErrors(merged.linears, console);
  PrintCarried(merged.carried, console);
  if (flags.tool.to == "gptq") PrintZeroNote(merged.linears, console);
  console.out << OneLine(flags.tool.output) << ": " << merged.modules << " modules merged in FP32, "
              << merged.replaced << " tensors replaced, " << FormatBytes(merged.bytes_before)
              << " became " << FormatBytes(merged.bytes_after) << "\n";
}

void Print(const Flags& flags, const tools::Quantization& quantization, Console& console) {
  PrintErrors(quantization.linears, console);
  for (const tools::DenseLinear& linear : quantization.dense) {
    console.out << OneLine(absl::StrCat("stays dense: ", linear.path, ": ", linear.why)) << "\n";
  }
  PrintCarried(quantization.carried, console);
  if (flags.tool.to == "gptq") PrintZeroNote(quantization.linears, console);
  console.out << OneLine(flags.tool.output) << ": " << quantization.linears.size() << " linears, "
              << FormatBytes(quantization.bytes_before) << " became "
              << FormatBytes(quantization.bytes_after) << "\n";
}

// Runs a tool beside a bar of its progress, and prints its report.
template <typename Tool>
auto RunTool(const Flags& flags, Console& console, Tool tool) -> decltype(tool(tools::Progress())) {
  Progress progress(console, !flags.quiet);
  auto report = tool(std::ref(progress));
  progress.Clear();
  if (report.ok() && flags.json) PrintJson(tools::ToJson(*report), console);
  if (report.ok() && !flags.json) Print(flags, *report, console);
  return report;
}

}  // namespace

std::shared_ptr<void> RemovedOnSignal(const std::string& path) {
  return std::make_shared<client::RemoveOnSignal>(path);
}

absl::StatusOr<int> Inspect(const Flags& flags, Console& console) {
  AWQD_ASSIGN_OR_RETURN(const tools::Inspection inspection,
                        RunTool(flags, console, [&](const tools::Progress& progress) {
                          return tools::Inspect(flags.tool.folder, progress);
                        }));
  if (inspection.loads()) return kOk;
  console.err << "awqctl: " << OneLine(flags.tool.folder) << " does not load as a whole\n";
  return kDoesNotLoad;
}

absl::StatusOr<int> Diff(const Flags& flags, Console& console) {
  AWQD_ASSIGN_OR_RETURN(const tools::FolderDifference difference,
                        RunTool(flags, console, [&](const tools::Progress& progress) {
                          return tools::Diff(flags.tool.folder, flags.tool.other, flags.tool.worst,
                                             progress);
                        }));
  if (difference.same()) return kOk;
  console.err << "awqctl: " << OneLine(flags.tool.folder) << " differs from "
              << OneLine(flags.tool.other) << "\n";
  return kDiffers;
}

absl::StatusOr<int> Convert(const Flags& flags, Console& console) {
  const tools::ConvertOptions options = {.folder = flags.tool.folder,
                                         .output = flags.tool.output,
                                         .target = tools::TargetNamed(flags.tool.to),
                                         .dtype = flags.tool.dtype,
                                         .verify = flags.tool.verify,
                                         .guard = RemovedOnSignal};
  AWQD_RETURN_IF_ERROR(RunTool(flags, console, [&](const tools::Progress& progress) {
                         return tools::Convert(options, progress);
                       }).status());
  return kOk;
}

namespace {

tools::QuantizeOptions OptionsOf(const Flags& flags) {
  const tools::Target* const target = tools::TargetNamed(flags.tool.to);
  return {.folder = flags.tool.folder,
          .output = flags.tool.output,
          .target = target,
          .rtn = {.bits = flags.tool.bits,
                  .group_size = flags.tool.group_size,
                  .symmetric = flags.tool.symmetric || !target->asymmetric,
                  .search = flags.tool.search},
          .leave_out = flags.tool.leave_out,
          .guard = RemovedOnSignal};
}

}  // namespace

absl::StatusOr<int> Quantize(const Flags& flags, Console& console) {
  const tools::QuantizeOptions options = OptionsOf(flags);
  if (const absl::Status status = tools::Validate(options); !status.ok()) {
    return BadArguments(status);
  }
  AWQD_RETURN_IF_ERROR(RunTool(flags, console, [&](const tools::Progress& progress) {
                         return tools::Quantize(options, progress);
                       }).status());
  return kOk;
}

absl::StatusOr<int> Merge(const Flags& flags, Console& console) {
  const tools::MergeOptions options = {
      .quantize = OptionsOf(flags), .adapter = flags.tool.other, .dtype = flags.tool.dtype};
  if (const absl::Status status = tools::Validate(options); !status.ok()) {
    return BadArguments(status);
  }
  AWQD_RETURN_IF_ERROR(RunTool(flags, console, [&](const tools::Progress& progress) {
                         return tools::Merge(options, progress);
                       }).status());
  return kOk;
}

}  // namespace awqd::awqctl
