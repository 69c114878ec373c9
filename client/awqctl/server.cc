// awqctl status, models, load, unload, kernels and healthcheck.
#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "client/awqctl/commands.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"

namespace awqd::awqctl {
namespace {

constexpr absl::Duration kHealthTimeout = absl::Seconds(5);

// "1-255", "256-"
std::string TokenRange(int64_t min_tokens, int64_t max_tokens) {
  if (max_tokens < 0) return absl::StrCat(min_tokens, "-");
  return absl::StrCat(min_tokens, "-", max_tokens);
}

// "READY", "LOADING 43 %"
std::string StateName(const v1::ModelSummary& model) {
  const std::string& name = v1::ModelState_Name(model.state());
  if (model.state() != v1::LOADING) return name;
  return absl::StrCat(name, " ", static_cast<int>(100 * model.loaded_share()), " %");
}

Table ModelTable(const v1::ListModelsResponse& models) {
  Table table({"MODEL", "STATE", "WEIGHTS", "MEMORY", "VERSION", "MESSAGE"});
  for (const v1::ModelSummary& model : models.models()) {
    table.AddRow({model.name(), StateName(model), absl::StrCat(model.weights()),
                  FormatBytes(model.device_bytes()), absl::StrCat(model.version()),
                  model.message()});
  }
  return table;
}

Table DeviceTable(const v1::GetServerInfoResponse& info) {
  Table table({"DEVICE", "NAME", "KIND", "MEMORY", "FREE", "WEIGHTS", "HEALTHY"});
  for (const v1::DeviceStatus& device : info.devices()) {
    table.AddRow({device.id(), device.name(),
                  device.isa().empty() ? absl::StrCat("sm_", device.arch()) : device.isa(),
                  FormatBytes(device.memory_total_bytes()), FormatBytes(device.memory_free_bytes()),
                  FormatBytes(device.weights_bytes()), device.healthy() ? "yes" : "NO"});
  }
  return table;
}

// "cuda:0", "cuda:0, cuda:1" for replicas, "cuda:0 [0, 2048), cuda:1 [2048, 4096)" for columns.
std::string Where(const v1::WeightInfo& weight) {
  if (weight.parts_size() < 2) return weight.device();
  std::vector<std::string> parts;
  for (const v1::WeightPart& part : weight.parts()) {
    const bool whole = part.column_begin() == 0 && part.column_end() == weight.n();
    parts.push_back(whole ? part.device()
                          : absl::StrCat(part.device(), " [", part.column_begin(), ", ",
                                         part.column_end(), ")"));
  }
  return absl::StrJoin(parts, ", ");
}

using Stacks = std::map<std::string, const v1::StackInfo*, std::less<>>;

Stacks UsableStacks(const v1::GetModelResponse& model) {
  Stacks out;
  for (const v1::StackInfo& stack : model.stacks()) {
    if (stack.refused().empty()) out.emplace(stack.path(), &stack);
  }
  return out;
}

// The stack that the weight of that path is an expert of, and the expert's number; null for other
// weights. Their paths are the same but for the number, where the stack's has "*".
std::pair<const v1::StackInfo*, int> StackOf(const std::string& path, const Stacks& stacks) {
  std::vector<absl::string_view> components = absl::StrSplit(path, '.');
  for (absl::string_view& component : components) {
    int expert = 0;
    if (!absl::SimpleAtoi(component, &expert) || absl::StrCat(expert) != component) continue;
    const absl::string_view number = std::exchange(component, "*");
    const auto it = stacks.find(absl::StrJoin(components, "."));
    if (it != stacks.end() && expert >= 0 && expert < it->second->experts()) {
      return {it->second, expert};
    }
    component = number;
  }
  return {nullptr, 0};
}

// The quantisation of activations that the checkpoint declares.
std::string Declared(const v1::WeightInfo& weight) {
  const auto scale = [&] { return absl::StrCat(", scale ", weight.activation_scale(), ")"); };
  switch (weight.activations()) {
    case v1::INT8_PER_TOKEN:
      return " (declared: per_token)";
    case v1::INT8_STATIC:
      return absl::StrCat(" (declared: static", scale());
    case v1::FP8_PER_TOKEN:
      return " (declared: fp8)";
    case v1::FP8_PER_BLOCK_128:
      return " (declared: fp8_block)";
    case v1::FP8_STATIC:
      return absl::StrCat(" (declared: fp8_static", scale());
    default:
      return "";
  }
}

// "fused 1-255 cpu/qmatmul_a16", and what quantised activations take.
std::vector<std::string> PlanLines(const v1::WeightInfo& weight) {
  std::vector<std::string> out;
  for (const v1::PlanEntry& entry : weight.plan()) {
    out.push_back(absl::StrCat(PathName(entry.path()), " ",
                               TokenRange(entry.min_tokens(), entry.max_tokens()), " ",
                               entry.kernel()));
  }
  if (!weight.float8_kernel().empty()) {
    out.push_back(absl::StrCat("E4M3 activations ", weight.float8_kernel(), Declared(weight)));
  } else if (weight.activations() >= v1::FP8_PER_TOKEN) {
    out.push_back(absl::StrCat("E4M3 activations are rounded, then as others", Declared(weight)));
  }
  if (!weight.a8_kernel().empty()) {
    out.push_back(absl::StrCat("quantised activations ", weight.a8_kernel(), Declared(weight)));
  }
  return out;
}

// "factor bias", as the files' report has it.
std::string WithParts(const v1::WeightInfo& weight) {
  std::vector<std::string> parts;
  if (weight.has_factor()) parts.emplace_back("factor");
  if (weight.hadamard_size() > 0) parts.push_back(absl::StrCat("hadamard", weight.hadamard_size()));
  if (weight.has_bias()) parts.emplace_back("bias");
  return absl::StrJoin(parts, " ");
}

// The plans of a table's weights, in the order of their numbers, which begin with 1.
using Plans = std::vector<std::vector<std::string>>;

// The number of `lines` among the plans; adds them where they are new. "-" without lines.
std::string PlanNumber(std::vector<std::string> lines, Plans& plans) {
  if (lines.empty()) return "-";
  const auto at = absl::c_find(plans, lines);
  const auto index = at - plans.begin();
  if (at == plans.end()) plans.push_back(std::move(lines));
  return absl::StrCat(index + 1);
}

// A line for each weight that is no expert of a usable stack, and one for each usable stack, of
// which expert 0 tells the layout, the place and the kernels. Lines of equal layers are folded.
Table WeightTable(const v1::GetModelResponse& model, const Stacks& stacks, Plans& plans) {
  std::vector<std::string> header = {"WEIGHT", "K",      "N",    "SCHEME", "LAYOUT",
                                     "MEMORY", "DEVICE", "WITH", "KERNELS"};
  if (!stacks.empty()) header.insert(header.begin() + 1, "EXPERTS");
  Table table(header);
  for (const v1::WeightInfo& weight : model.weights()) {
    const auto [stack, expert] = StackOf(weight.path(), stacks);
    if (stack != nullptr && expert != 0) continue;
    std::vector<std::string> row = {stack != nullptr ? stack->path() : weight.path(),
                                    absl::StrCat(weight.k()),
                                    absl::StrCat(weight.n()),
                                    weight.scheme(),
                                    weight.layout(),
                                    FormatBytes(stack != nullptr ? stack->bytes() : weight.bytes()),
                                    Where(weight),
                                    WithParts(weight),
                                    PlanNumber(PlanLines(weight), plans)};
    if (!stacks.empty()) {
      row.insert(row.begin() + 1, stack != nullptr ? absl::StrCat(stack->experts()) : "-");
    }
    table.AddRow(std::move(row));
  }
  table.Fold();
  return table;
}

// "not served:" and a line for each quantised weight that is not; empty where there is none.
std::string UnservedLines(const google::protobuf::RepeatedPtrField<v1::UnservedWeight>& unserved) {
  if (unserved.empty()) return "";
  return absl::StrCat("\nquantised weights that are not served:\n",
                      absl::StrJoin(unserved, "", [](std::string* out, const auto& weight) {
                        absl::StrAppend(out, OneLine(weight.reason()), "\n");
                      }));
}

// "4096 x 4096, sm90a/qmatmul_a16: 64: 64x192 on 132 blocks": weights of one shape are cut alike.
std::set<std::string> TileLines(const v1::GetModelResponse& model) {
  std::set<std::string> out;
  for (const v1::WeightInfo& weight : model.weights()) {
    for (const v1::PlanEntry& entry : weight.plan()) {
      if (entry.tiles().empty()) continue;
      out.insert(absl::StrCat(weight.k(), " x ", weight.n(), ", ", OneLine(entry.kernel()), ": ",
                              OneLine(entry.tiles()), "\n"));
    }
  }
  return out;
}

void PrintWeights(const v1::GetModelResponse& model, Console& console) {
  const v1::ModelSummary& summary = model.model();
  Plans plans;
  const Table table = WeightTable(model, UsableStacks(model), plans);
  std::set<std::string> schemes;
  for (const v1::WeightInfo& weight : model.weights()) schemes.insert(weight.scheme());
  console.out << Wrapped(
                     absl::StrCat(OneLine(summary.name()), ": ", StateName(summary), ", version ",
                                  summary.version(), ", ", OneLine(model.quant_method()), ", ",
                                  model.weights_size(), " weights, ",
                                  model.stacks_size() > 0
                                      ? absl::StrCat(model.stacks_size(), " stacks, ")
                                      : "",
                                  FormatBytes(summary.device_bytes()), ", ",
                                  model.ignored_tensors(), " other tensors ignored"),
                     console)
              << "\n\n"
              << table.Text(console) << "\n"
              << Wrapped(SchemeLines(schemes), console);
  for (size_t i = 0; i < plans.size(); ++i) {
    console.out << "kernels " << i + 1 << ":\n";
    for (const std::string& line : plans[i]) console.out << "  " << OneLine(line) << "\n";
  }
  std::vector<std::string> refused;
  for (const v1::StackInfo& stack : model.stacks()) {
    if (!stack.refused().empty()) refused.push_back(OneLine(stack.refused()) + "\n");
  }
  if (!refused.empty()) {
    console.out << "\nstacks that cannot be used:\n" << absl::StrJoin(refused, "");
  }
  console.out << UnservedLines(model.unserved());
  const std::set<std::string> tiles = TileLines(model);
  if (!tiles.empty()) console.out << "\ntiles of tokens x columns:\n" << absl::StrJoin(tiles, "");
}

// The border between the two paths, as the server states it.
std::string Threshold(int64_t tokens) {
  if (tokens == -1) return "fused below a count measured for each shape";
  if (tokens < 0) return "fused below 256 tokens, or always where that kernel is faster";
  return absl::StrCat("fused below ", tokens, " tokens");
}

}  // namespace

absl::StatusOr<int> Status(const Flags& flags, client::Client& client, Console& console) {
  const client::CallOptions deadline = Deadline(flags);
  AWQD_ASSIGN_OR_RETURN(const auto info, client.GetServerInfo(deadline));
  if (flags.json) {
    console.out << ToJson(info);
    return kOk;
  }
  AWQD_ASSIGN_OR_RETURN(const auto models, client.ListModels(deadline));
  const v1::Limits& limits = info.limits();
  const std::string shard = absl::StrCat("shard: ", OneLine(info.shard()), "\n");
  const std::string head =
      absl::StrCat("awqd ", OneLine(info.version()), " at ", flags.address, ", up ",
                   absl::FormatDuration(absl::Seconds(info.uptime_s())), ", reads ",
                   OneLine(absl::StrJoin(info.formats(), ", ")));
  const std::string bounds = absl::StrCat(
      "limits: receive ", FormatBytes(limits.max_receive_bytes()), ", send ",
      FormatBytes(limits.max_send_bytes()), ", ", Threshold(limits.token_threshold()), ", batch ",
      limits.max_batch_tokens(), " tokens, queue ", limits.max_queued_requests(), " requests");
  console.out << Wrapped(head, console) << "\n\n"
              << DeviceTable(info).Text(console) << (info.devices_size() > 1 ? shard : "") << "\n"
              << Wrapped(bounds, console) << "\n\n"
              << ModelTable(models).Text(console);
  return kOk;
}

absl::StatusOr<int> Models(const Flags& flags, client::Client& client, Console& console) {
  const client::CallOptions deadline = Deadline(flags);
  if (flags.model.empty()) {
    AWQD_ASSIGN_OR_RETURN(const auto models, client.ListModels(deadline));
    console.out << (flags.json ? ToJson(models) : ModelTable(models).Text(console));
    return kOk;
  }
  AWQD_ASSIGN_OR_RETURN(const auto model, client.GetModel(flags.model, deadline));
  if (flags.json) {
    console.out << ToJson(model);
  } else {
    PrintWeights(model, console);
  }
  return kOk;
}

absl::StatusOr<int> Load(const Flags& flags, client::Client& client, Console& console) {
  // A large checkpoint on a slow disk takes what it takes.
  AWQD_ASSIGN_OR_RETURN(const auto loaded,
                        client.LoadModel(flags.model, Deadline(flags, absl::InfiniteDuration()),
                                         flags.require_all_weights));
  const v1::ModelSummary& model = loaded.model();
  if (flags.json) {
    console.out << ToJson(loaded);
    return kOk;
  }
  console.out << "loaded " << OneLine(model.name()) << " version " << model.version() << ": "
              << model.weights() << " weights, " << FormatBytes(model.device_bytes()) << ", "
              << loaded.ignored_tensors() << " other tensors ignored, " << loaded.load_ms()
              << " ms\n"
              << UnservedLines(loaded.unserved());
  return kOk;
}

absl::StatusOr<int> Unload(const Flags& flags, client::Client& client, Console& console) {
  AWQD_RETURN_IF_ERROR(client.UnloadModel(flags.model, Deadline(flags)));
  console.out << (flags.json ? "{}\n" : absl::StrCat("unloaded ", flags.model, "\n"));
  return kOk;
}

namespace {

constexpr absl::string_view kFloats = "FP16, BF16, FP32";

// "floats" for all three of them.
std::string TypesText(const google::protobuf::RepeatedPtrField<std::string>& types) {
  return absl::StrReplaceAll(absl::StrJoin(types, ", "), {{kFloats, "floats"}});
}

// The first `columns` of the columns, and the kernel's name.
Table NarrowKernels(const v1::GetServerInfoResponse& info, size_t columns) {
  const auto cut = [columns](std::vector<std::string> row) {
    row.resize(columns + 1);
    return row;
  };
  Table table(
      cut({"KERNEL", "OPERATION", "BITS", "TOKENS", "IN", "OUT", "GROUPS", "LAYOUT", "NEEDS"}));
  for (const v1::KernelInfo& kernel : info.kernels()) {
    const bool dequantize = kernel.operation() == "dequantize";
    const bool dense = !dequantize && kernel.path() != "fused";
    table.AddRow(
        cut({kernel.name(), absl::StrCat(kernel.operation(), dense ? "*" : ""),
             ListRuns({kernel.bits().begin(), kernel.bits().end()}),
             dequantize ? "-" : TokenRange(kernel.min_tokens(), kernel.max_tokens()),
             dequantize ? "-" : TypesText(kernel.activations()), TypesText(kernel.outputs()),
             kernel.group_multiple() <= 1 ? "any" : absl::StrCat("n x ", kernel.group_multiple()),
             kernel.layout(), kernel.needs()}));
  }
  return table;
}

// A line for each kernel, with as many columns as the screen has room for, and what they leave out.
std::string NarrowKernelsText(const v1::GetServerInfoResponse& info, const Console& console) {
  constexpr size_t kMost = 8, kLeast = 5;
  const size_t room = SizeOfScreen(console).columns;
  size_t columns = kMost;
  while (columns > kLeast && !NarrowKernels(info, columns).Fits(room)) --columns;
  std::string notes =
      absl::StrCat("floats: ", kFloats, ". *: path dequantize, not fused. More: --wide.\n");
  std::set<std::string> refused;  // rows of one kernel have one reason
  for (const v1::KernelInfo& kernel : info.kernels()) {
    if (kernel.available()) continue;
    refused.insert(absl::StrCat(OneLine(kernel.name()), ": not here: ", OneLine(kernel.reason())));
  }
  for (const std::string& line : refused) absl::StrAppend(&notes, line, "\n");
  return absl::StrCat(NarrowKernels(info, columns).Text(console), "\n", Wrapped(notes, console));
}

}  // namespace

absl::StatusOr<int> Kernels(const Flags& flags, client::Client& client, Console& console) {
  AWQD_ASSIGN_OR_RETURN(const auto info, client.GetServerInfo(Deadline(flags)));
  if (flags.json) {
    v1::GetServerInfoResponse only_kernels;
    *only_kernels.mutable_kernels() = info.kernels();
    console.out << ToJson(only_kernels);
    return kOk;
  }
  if (!flags.markdown && !flags.wide) {
    console.out << NarrowKernelsText(info, console);
    return kOk;
  }
  Table table({"Kernel", "Operation", "Path", "Bits", "Groups of", "Tokens", "Activations",
               "Outputs", "Layout", "Needs", "Here"});
  for (const v1::KernelInfo& kernel : info.kernels()) {
    const bool dequantize = kernel.operation() == "dequantize";
    table.AddRow(
        {kernel.name(), kernel.operation(), dequantize ? "-" : kernel.path(),
         absl::StrJoin(kernel.bits(), ", "),
         kernel.group_multiple() <= 1 ? "any" : absl::StrCat("n x ", kernel.group_multiple()),
         dequantize ? "-" : TokenRange(kernel.min_tokens(), kernel.max_tokens()),
         dequantize ? "-" : absl::StrJoin(kernel.activations(), ", "),
         absl::StrJoin(kernel.outputs(), ", "), kernel.layout(), kernel.needs(),
         kernel.available() ? "yes" : absl::StrCat("no: ", kernel.reason())});
  }
  constexpr size_t kAnyWidth = std::numeric_limits<size_t>::max();
  console.out << (flags.markdown ? table.Markdown() : table.Text(kAnyWidth, false));
  return kOk;
}

absl::StatusOr<int> Healthcheck(const Flags& flags, client::Client& client, Console& console) {
  const absl::Time until = absl::Now() + flags.wait;
  while (true) {
    client::CallOptions options = Deadline(flags, kHealthTimeout);
    if (const absl::Duration left = until - absl::Now(); left > absl::ZeroDuration()) {
      options.wait_for_server = true;
      options.timeout = std::min(options.timeout, std::max(left, absl::Milliseconds(100)));
    }
    const auto serving = client.IsServing(flags.service, options);
    if (serving.ok() && *serving) {
      console.out << (flags.json ? "{\"status\": \"SERVING\"}\n" : "SERVING\n");
      return kOk;
    }
    if (absl::Now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      continue;
    }
    if (!serving.ok()) return serving.status();
    console.out << (flags.json ? "{\"status\": \"NOT_SERVING\"}\n" : "NOT_SERVING\n");
    console.err << "awqctl: the server is not serving\n";
    return kNotServing;
  }
}

}  // namespace awqd::awqctl
