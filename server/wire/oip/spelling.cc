// Fields of awqd.v1 in the words of the inference protocol.
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/wire/oip/infer_wire.h"
#include "server/wire/status.h"

namespace awqd::wire::oip {
namespace {

struct Word {
  absl::string_view ours, theirs;
};

// Inputs, by the fields that they become.
constexpr Word kTensors[] = {{"activations", "x"},
                             {"expert_ids", "ids"},
                             {"router_weights", "router_weights"},
                             {"bias", "bias"},
                             {"activation_scales", "activation_scales"}};
// What a tensor has, longest first where one begins with another.
constexpr Word kMembers[] = {{".dtype", ".datatype"},
                             {".floats.values", ".contents.fp32_contents"},
                             {".floats", ".contents.fp32_contents"},
                             {".ints.values", ".contents.int_contents"},
                             {".ints", ".contents.int_contents"},
                             {".shared_memory.name", ".parameters[shared_memory_region]"},
                             {".shared_memory.offset", ".parameters[shared_memory_offset]"},
                             {".shared_memory.size", ".parameters[shared_memory_byte_size]"},
                             {".shared_memory", ".parameters[shared_memory_region]"}};
constexpr Word kOthers[] = {
    {"weight.model", "model_name"},
    {"weight.weight", "model_name"},
    {"weight", "model_name"},
    {"mlp.model", "model_name"},
    {"mlp.path", "model_name"},
    {"mlp.gate", "model_name"},
    {"mlp.up", "model_name"},
    {"mlp.down", "model_name"},
    {"request_id", "id"},
    {"output_dtype", "parameters[output_dtype]"},
    {"path", "parameters[path]"},
    {"activation_function", "parameters[activation_function]"},
    {"activation_quantization", "parameters[activation_quantization]"},
    {"rows", "parameters[row_begin, row_end]"},
    {"columns", "parameters[column_begin, column_end]"},
    {"output_shared_memory.name", "outputs[0].parameters[shared_memory_region]"},
    {"output_shared_memory.offset", "outputs[0].parameters[shared_memory_offset]"},
    {"output_shared_memory.size", "outputs[0].parameters[shared_memory_byte_size]"},
    {"output_shared_memory", "outputs[0].parameters[shared_memory_region]"}};

// Whether `text` begins with the whole of `word`, which is then taken off.
bool Take(absl::string_view word, absl::string_view* text) {
  absl::string_view rest = *text;
  if (!absl::ConsumePrefix(&rest, word)) return false;
  if (!rest.empty() && rest.front() != '.' && rest.front() != '[' && rest.front() != ':') {
    return false;
  }
  *text = rest;
  return true;
}

std::string Renamed(absl::string_view text) {
  for (const Word& tensor : kTensors) {
    if (!Take(tensor.ours, &text)) continue;
    if (Take(".raw", &text)) return absl::StrCat("raw_input_contents[", tensor.theirs, "]", text);
    absl::string_view member;
    for (const Word& word : kMembers) {
      if (!Take(word.ours, &text)) continue;
      member = word.theirs;
      break;
    }
    return absl::StrCat("inputs[", tensor.theirs, "]", member, text);
  }
  for (const Word& word : kOthers) {
    if (Take(word.ours, &text)) return absl::StrCat(word.theirs, text);
  }
  return std::string(text);
}

}  // namespace

absl::Status Spelled(const absl::Status& status) {
  const std::string field = FieldOf(status);
  if (field.empty()) return status;
  absl::Status out(status.code(), Renamed(status.message()));
  status.ForEachPayload(
      [&out](absl::string_view url, const absl::Cord& payload) { out.SetPayload(url, payload); });
  return WithField(std::move(out), Renamed(field));
}

}  // namespace awqd::wire::oip
