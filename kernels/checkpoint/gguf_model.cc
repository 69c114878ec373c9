// Finding GGUF files, and sorting their tensors.
#include "kernels/checkpoint/gguf_model.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/checkpoint_files.h"
#include "kernels/checkpoint/expert_path.h"

namespace awqd::model {
namespace {

constexpr absl::string_view kExtension = ".gguf";
constexpr absl::string_view kPlainTypes[] = {"F16", "BF16", "F32", "F64",
                                             "I8",  "I16",  "I32", "I64"};

// Tensors of one type: how many, and the first of them.
struct Some {
  int count = 0;
  absl::string_view first;
};
using ByType = std::map<std::string, Some>;

std::string Listed(const ByType& types, bool with_names) {
  return absl::StrJoin(types, ", ", [&](std::string* out, const auto& entry) {
    absl::StrAppend(out, entry.second.count, " of ", entry.first);
    if (with_names) absl::StrAppend(out, " (", Quoted(entry.second.first), ")");
  });
}

// Whether a tensor of blocks is a linear [N, K], or all experts [E, N, K] of one.
bool IsLinear(absl::string_view path, const TensorInfo& tensor) {
  return tensor.shape.size() == 2 || (tensor.shape.size() == 3 && IsPathOfAllExperts(path));
}

}  // namespace

absl::StatusOr<std::string> FindGguf(const FileSource& root, absl::string_view model) {
  const absl::StatusOr<std::vector<std::string>> names = root.ListDirectory(model);
  if (!names.ok()) return std::string(absl::EndsWith(model, kExtension) ? model : "");
  if (absl::c_linear_search(*names, kConfigFile)) return std::string();
  std::vector<std::string> found;
  for (const std::string& name : *names) {
    if (name.front() != '.' && absl::EndsWith(name, kExtension)) found.push_back(name);
  }
  if (found.empty()) return std::string();
  if (found.size() == 1) return absl::StrCat(model, "/", found[0]);
  return Invalid(model, ": got ", found.size(), " *.gguf files, such as ", Quoted(found[0]),
                 " and ", Quoted(found[1]), ", expected one, or a ", kConfigFile);
}

absl::Status FindModel(const FileSource& root, absl::string_view model) {
  AWQD_ASSIGN_OR_RETURN(const std::string gguf, FindGguf(root, model));
  return root.OpenFile(gguf.empty() ? absl::StrCat(model, "/", kConfigFile) : gguf).status();
}

FoundFormat FormatOfGguf(const GgufFile& file) {
  FoundFormat out = {.format = &kGgufFormat, .quant_method = std::string(kGgufFormat.quant_method)};
  out.config.rules = {{.targets = {{}}, .settings = {}, .format = &kGgufFormat}};
  ByType plain, unread, other;
  for (const auto& [name, tensor] : file.tensors.tensors()) {
    absl::string_view path = name;
    const bool weight = absl::ConsumeSuffix(&path, ".weight");
    const bool read = absl::c_linear_search(kGgufFormat.code_dtypes, tensor.dtype);
    if (read && weight && IsLinear(path, tensor)) continue;
    if (read && weight) {
      out.config.left_out.push_back({ModulePattern::Kind::kExact, std::string(path)});
    }
    ByType& types = read                                               ? other
                    : absl::c_linear_search(kPlainTypes, tensor.dtype) ? plain
                                                                       : unread;
    Some& some = types[tensor.dtype];
    if (some.count++ == 0) some.first = name;
  }
  std::vector<std::string> parts = {absl::StrCat("GGUF of ", Quoted(file.architecture))};
  if (!plain.empty()) parts.push_back(absl::StrCat("not quantised: ", Listed(plain, false)));
  if (!unread.empty()) parts.push_back(absl::StrCat("not readable: ", Listed(unread, true)));
  if (!other.empty()) parts.push_back(absl::StrCat("no linears: ", Listed(other, true)));
  out.config.note = absl::StrJoin(parts, "; ");
  return out;
}

}  // namespace awqd::model
