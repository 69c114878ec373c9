// Fuzzes names: of models, in requests and in folders; of weights and tensors; of files in the
// repository; and the patterns that choose linears.
//
// Input: parts between bytes 0xff. The first is a name, the second a path, each other one a
// pattern, whose first byte is its kind.
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kernels/checkpoint/experts.h"
#include "kernels/checkpoint/linear_rules.h"
#include "kernels/checkpoint/model_folder.h"
#include "kernels/checkpoint/repository_root.h"
#include "kernels/checkpoint/tensor_names.h"
#include "server/obs/logging.h"
#include "server/repository/model_folders.h"
#include "server/wire/oip/name.h"
#include "tests/fuzz/require.h"

namespace {

using awqd::fuzz::Require;
using awqd::fuzz::RequireOneLine;
using awqd::model::RepositoryRoot;
namespace fs = std::filesystem;

constexpr absl::string_view kInside = "{\"where\": \"inside\"}";
constexpr char kHash[] = "0123456789012345678901234567890123456789";

void Write(const fs::path& path, absl::string_view text) {
  fs::create_directories(path.parent_path());
  std::ofstream(path) << text;
}

// A repository with models, links that stay inside and links that leave it.
class Ground {
 public:
  Ground() {
    std::string name = (fs::temp_directory_path() / "awqd-fuzz-XXXXXX").string();
    Require(mkdtemp(name.data()) != nullptr);
    folder_ = name;
    Write(root() / "m" / "config.json", kInside);
    Write(root() / "m" / "deep" / "config.json", kInside);
    Write(root() / "models--O--N" / "snapshots" / kHash / "config.json", kInside);
    Write(root() / "models--O--N" / "refs" / "main", kHash);
    Write(fs::path(folder_) / "outside" / "config.json", "outside");
    fs::create_directory_symlink("m", root() / "link");
    fs::create_directory_symlink("..", root() / "m" / "up");
    fs::create_directory_symlink("../outside", root() / "out");
    fs::create_directory_symlink(fs::path(folder_) / "outside", root() / "absolute");
    fs::create_directory_symlink("loop", root() / "loop");
  }
  ~Ground() { fs::remove_all(folder_); }
  fs::path root() const { return fs::path(folder_) / "repository"; }

 private:
  std::string folder_;
};

const Ground& TheGround() {
  static const Ground ground;
  return ground;
}

// The rule of CheckModelName, implemented again.
bool IsLegal(absl::string_view name) {
  if (name.empty() || name.size() > 128 || name.front() == '.') return false;
  for (const char c : name) {
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    if (!letter && !(c >= '0' && c <= '9') && c != '.' && c != '_' && c != '-') return false;
  }
  return true;
}

// The error for the client that sent `name`: one line without a path of the server.
void RequireTellable(const absl::Status& status, absl::string_view name) {
  RequireOneLine(status.message());
  const std::string root = TheGround().root().string();
  Require(!absl::StrContains(status.message(), root) || absl::StrContains(name, root));
  Require(status.code() != absl::StatusCode::kUnknown);
  Require(status.code() != absl::StatusCode::kInternal);
}

void CheckModel(absl::string_view name) {
  static const awqd::repository::ModelFolders folders(TheGround().root().string());
  const absl::Status checked = awqd::repository::CheckModelName(name);
  Require(checked.ok() == IsLegal(name));
  Require(checked.ok() || absl::IsInvalidArgument(checked));
  const auto located = folders.Locate(name);
  Require(located.ok() == (name == "m" || name == "link" || name == "O--N"));
  RequireTellable(located.status(), name);
  (void)folders.Inspect(name);
  const auto hub = awqd::model::HubModelName(name);
  if (hub) Require(awqd::model::HubFolder(*hub) == name);
  (void)awqd::model::HubId(name);
}

// An opened file is a file of the repository; both ways to open agree.
void CheckFile(absl::string_view path) {
  static const RepositoryRoot root = *RepositoryRoot::Open(TheGround().root().string());
  static const RepositoryRoot other =
      *RepositoryRoot::Open(TheGround().root().string(), RepositoryRoot::Resolve::kCanonicalise);
  bool opened[2];
  for (const RepositoryRoot* one : {&root, &other}) {
    const auto file = one->OpenFile(path);
    opened[one == &other] = file.ok();
    RequireTellable(file.status(), path);
    if (!file.ok()) continue;
    std::string text(static_cast<size_t>(file->size()), '\0');
    Require(
        file->ReadAt(0, absl::MakeSpan(reinterpret_cast<uint8_t*>(text.data()), text.size())).ok());
    Require(text == kInside || text == kHash);
  }
  Require(opened[0] == opened[1]);
  (void)root.ListDirectory(path);
}

void CheckExpert(absl::string_view path) {
  if (const auto expert = awqd::model::ParseExpertPath(path)) {
    std::vector<absl::string_view> was = absl::StrSplit(path, '.');
    const std::vector<std::string> stack = absl::StrSplit(expert->stack, '.');
    Require(was.size() == stack.size());
    const std::string number = absl::StrCat(expert->expert);
    int changed = 0;
    for (size_t i = 0; i < was.size(); ++i) {
      if (was[i] == stack[i]) continue;
      ++changed;
      Require(was[i] == number && stack[i] == "*");
      const bool behind_projection = i >= 2 && i + 1 == was.size() && was[i - 2] == "experts";
      Require((i > 0 && was[i - 1] == "experts") || behind_projection);
    }
    Require(changed == 1);
  }
  if (!awqd::model::IsPathOfAllExperts(path)) return;
  for (const int64_t number : {int64_t{0}, int64_t{12}, awqd::model::kMaxExperts - 1}) {
    const auto expert = awqd::model::ParseExpertPath(awqd::model::PathOfExpert(path, number));
    Require(expert.has_value() && expert->expert == number);
  }
}

void CheckTensorName(absl::string_view name) {
  for (const awqd::Format* format : awqd::AllFormats()) {
    const auto split = awqd::model::SplitTensorName(*format, name);
    if (split.suffix.empty()) {
      Require(split.path.empty());
    } else if (split.path.empty()) {
      Require(absl::EndsWith(name, split.suffix));
    } else {
      Require(awqd::model::TensorName(*format, split.path, split.suffix) == name);
    }
  }
  for (const char* dtype : {"I32", "U8", "F8_E4M3", "Q4_0"}) {
    awqd::model::TensorInfo tensor;
    tensor.dtype = dtype;
    tensor.shape = {8, 8};
    Require(absl::StartsWith(name, awqd::model::ParseCodes(name, tensor).path));
  }
}

void CheckProtocolName(absl::string_view name) {
  const auto split = awqd::wire::oip::SplitName(name);
  Require(!absl::StrContains(split.model, '/'));
  if (!absl::StrContains(name, '/')) {
    Require(split.path.empty() && split.model == name);
    return;
  }
  Require(awqd::wire::oip::JoinName(split.model, split.path, split.kind) == name);
}

// In the log the text is one line, and logging that line again does not change it.
void CheckShown(absl::string_view text) {
  const std::string line = awqd::OneLine(text);
  RequireOneLine(line);
  Require(awqd::OneLine(line) == line);
  RequireOneLine(awqd::obs::LogText(text, 16));
  RequireOneLine(awqd::Quoted(text, 16));
}

absl::string_view WithoutWrappers(absl::string_view path) {
  for (absl::string_view rest = path;; path = rest) {
    const bool wrapped =
        absl::ConsumePrefix(&rest, "model.") || absl::ConsumePrefix(&rest, "language_model.");
    if (!wrapped || rest.empty()) return path;
  }
}

bool Matches(const awqd::ModulePattern& pattern, absl::string_view path) {
  absl::string_view text = pattern.text;
  path = WithoutWrappers(path);
  switch (pattern.kind) {
    case awqd::ModulePattern::Kind::kEvery:
      return true;
    case awqd::ModulePattern::Kind::kPath:
      text = WithoutWrappers(text);
      return absl::StartsWith(absl::StrCat(path, "."), absl::StrCat(text, "."));
    case awqd::ModulePattern::Kind::kContains:
      absl::ConsumeSuffix(&text, ".");
      text = WithoutWrappers(text);
      return absl::StrContains(absl::StrCat(".", path, "."), absl::StrCat(".", text, "."));
    case awqd::ModulePattern::Kind::kRegex:
      break;  // no other function knows it
  }
  return false;
}

void CheckPatterns(absl::Span<const absl::string_view> parts, absl::string_view path) {
  awqd::LinearRule rule;
  bool regex = false, matches = false;
  for (const absl::string_view part : parts) {
    if (part.empty()) continue;
    const auto kind = static_cast<awqd::ModulePattern::Kind>(part.front() & 3);
    rule.targets.push_back({kind, std::string(part.substr(1))});
    regex |= kind == awqd::ModulePattern::Kind::kRegex;
    matches |= Matches(rule.targets.back(), path);
  }
  const auto targets = awqd::model::LinearRules::Make({.rules = {rule}});
  const auto left_out =
      awqd::model::LinearRules::Make({.rules = {{{{}}, {}, nullptr}}, .left_out = rule.targets});
  Require(targets.ok() == left_out.ok());
  if (!targets.ok()) {
    Require(regex && absl::IsInvalidArgument(targets.status()));
    RequireOneLine(targets.status().message());
    return;
  }
  const auto chosen_rule = targets->RuleOf(path), other = left_out->RuleOf(path);
  if (!chosen_rule.ok() || !other.ok()) return Require(regex);  // an automaton that grew too large
  const bool chosen = *chosen_rule != nullptr;
  Require(chosen == (*other == nullptr));
  Require(regex ? chosen || !matches : chosen == matches);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const std::vector<absl::string_view> parts = absl::StrSplit(text, '\xff');
  const absl::string_view path = parts.size() > 1 ? parts[1] : "";
  CheckModel(parts[0]);
  CheckFile(path);
  CheckExpert(path);
  CheckTensorName(path);
  CheckProtocolName(text);
  CheckShown(text);
  CheckPatterns(absl::MakeSpan(parts).subspan(std::min<size_t>(2, parts.size())), path);
  return 0;
}
