// The account of a checkpoint's tensors: whatever is dropped, renamed, retyped, copied or added, in
// files or settings, no quantised tensor is passed over and no weight that is served has other
// values than an unchanged checkpoint has.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/checkpoint/checkpoint.h"
#include "kernels/checkpoint/tensor_names.h"
#include "tests/kernels/checkpoint/test_files.h"
#include "tests/testing/places.h"

namespace awqd {
namespace {

using ::awqd::testing::SafetensorsOf;
using ::awqd::testing::TempDirectory;
using ::awqd::testing::TestTensor;
using ::awqd::testing::TestTensors;
using Json = nlohmann::ordered_json;  // the order of settings may count
namespace fs = std::filesystem;

constexpr int kMutations = 10'000;

// No setting says that these tensors exist: without them a file is valid, and has other values.
constexpr absl::string_view kUnsaid[] = {"zeros", "scales", "pre_quant_scale", "weight_zero_point"};

std::string ReadAll(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TestTensors ReadTensors(const std::string& file, std::string* metadata) {
  uint64_t size;
  std::memcpy(&size, file.data(), sizeof(size));
  TestTensors out;
  const Json header = Json::parse(file.substr(8, size));
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      *metadata = entry.dump();
      continue;
    }
    const auto begin = entry["data_offsets"][0].get<size_t>();
    const auto end = entry["data_offsets"][1].get<size_t>();
    out[name] = {entry["dtype"], entry["shape"], file.substr(8 + size + begin, end - begin)};
  }
  return out;
}

// A golden, and what its linears are.
struct Golden {
  std::string name;
  TestTensors tensors;
  std::string metadata;
  std::map<std::string, Json> settings;  // by file
  std::map<std::string, HostWeight> weights;
  std::map<std::string, std::set<std::string>> tensors_of;  // by path
  std::set<std::string> codes;                              // names of tensors
};

bool SameValues(const HostWeight& a, const HostWeight& b) {
  return a.k == b.k && a.n == b.n && a.scheme == b.scheme && a.codes == b.codes &&
         a.scales == b.scales && a.zeros == b.zeros && a.outer == b.outer && a.table == b.table &&
         a.order == b.order && a.factor == b.factor && a.hadamard == b.hadamard;
}

absl::StatusOr<model::Checkpoint> Open(const TempDirectory& directory, const std::string& name) {
  const auto root = model::RepositoryRoot::Open(directory.path());
  return model::Checkpoint::Open(*root, name);
}

void Write(const Golden& golden, const TempDirectory& directory) {
  for (const auto& [file, json] : golden.settings) directory.Write("m/" + file, json.dump());
  directory.Write("m/model.safetensors", SafetensorsOf(golden.tensors, golden.metadata));
}

// Every golden of safetensors in one file.
std::vector<Golden> ReadGoldens() {
  std::vector<Golden> out;
  const TempDirectory directory;
  for (const Format* format : AllFormats()) {
    for (const auto& folder : fs::directory_iterator(DataPath(std::string(format->name)))) {
      const fs::path file = folder.path() / "model.safetensors";
      if (!fs::exists(file)) continue;
      Golden& golden = out.emplace_back();
      golden.name = absl::StrCat(format->name, "/", folder.path().filename().string());
      golden.tensors = ReadTensors(ReadAll(file), &golden.metadata);
      for (const auto& entry : fs::directory_iterator(folder.path())) {
        if (entry.path().extension() != ".json") continue;
        golden.settings[entry.path().filename()] = Json::parse(ReadAll(entry.path()));
      }
      fs::remove_all(directory.At("m"));
      Write(golden, directory);
      const auto checkpoint = Open(directory, "m");
      EXPECT_TRUE(checkpoint.ok()) << golden.name << ": " << checkpoint.status();
      if (!checkpoint.ok()) continue;
      EXPECT_TRUE(checkpoint->unserved().empty()) << golden.name;
      std::vector<uint8_t> scratch;
      for (const model::LinearLocation& linear : checkpoint->linears()) {
        const auto weight = checkpoint->Read(linear, &scratch);
        EXPECT_TRUE(weight.ok()) << golden.name << ": " << weight.status();
        if (weight.ok()) golden.weights[linear.path] = *weight;
        const std::string& stored = linear.slice_of.empty() ? linear.path : linear.slice_of;
        for (const auto& [suffix, place] : linear.tensors) {
          const std::string name = absl::StrCat(stored, linear.rule->format->separator, suffix);
          golden.tensors_of[linear.path].insert(name);
          if (suffix == linear.rule->format->suffixes.front()) golden.codes.insert(name);
        }
      }
      // Every tensor is one of a linear's, or plainly not quantised.
      EXPECT_EQ(checkpoint->tensors().size(), golden.tensors.size());
      for (const auto& tensor : checkpoint->tensors()) {
        const std::string name(tensor.first);
        const bool part = absl::c_any_of(
            golden.tensors_of, [&](const auto& linear) { return linear.second.contains(name); });
        EXPECT_EQ(tensor.second.served, part) << golden.name << ": " << name;
      }
    }
  }
  return out;
}

// A change of one golden, and the tensors whose linears it concerns.
class Mutation {
 public:
  Mutation(Golden* golden, std::mt19937* random) : golden_(*golden), random_(*random) {}

  void Apply() {
    switch (Below(8)) {
      case 0:
        return Drop();
      case 1:
        return Rename();
      case 2:
        return Retype();
      case 3:
        return Copy();
      case 4:
        return Add();
      default:
        return ChangeSettings();
    }
  }

  const std::string& what() const { return what_; }
  const std::set<std::string>& touched() const { return touched_; }
  bool settings() const { return settings_; }
  // Whether a tensor of a linear is another one now, and so the linear's values.
  bool redefines() const {
    return redefines_ || absl::c_any_of(touched_, [&](const std::string& name) {
             return absl::c_any_of(kUnsaid, [&](absl::string_view last) {
               return absl::EndsWith(name, absl::StrCat(".", last)) &&
                      !golden_.tensors.contains(name);
             });
           });
  }

 private:
  size_t Below(size_t count) { return random_() % count; }
  template <typename Container>
  auto Any(Container& container) {
    return std::next(container.begin(), static_cast<ptrdiff_t>(Below(container.size())));
  }

  void Touch(const std::string& how, const std::string& name) {
    absl::StrAppend(&what_, how, " ", name);
    touched_.insert(name);
  }

  void Drop() {
    const auto it = Any(golden_.tensors);
    Touch("drop", it->first);
    golden_.tensors.erase(it);
  }

  void Put(const std::string& name, const TestTensor& tensor) {
    redefines_ |= golden_.tensors.contains(name);
    golden_.tensors[name] = tensor;
  }

  std::string OtherName(const std::string& name) {
    const size_t dot = name.rfind('.');
    const std::string last = name.substr(dot + 1);
    const std::string module = dot == name.npos ? "" : name.substr(0, dot + 1);
    switch (Below(4)) {
      case 0:
        return name + "_other";
      case 1:
        return "other." + name;
      case 2:
        return module + "other." + last;
      default:
        return module + std::string(*Any(AllFormats()[Below(AllFormats().size())]->suffixes));
    }
  }

  void Rename() {
    const auto it = Any(golden_.tensors);
    const std::string other = OtherName(it->first);
    Touch("rename", it->first);
    Touch(" to", other);
    const TestTensor tensor = it->second;
    golden_.tensors.erase(it);
    Put(other, tensor);
  }

  void Retype() {
    constexpr const char* kTypes[][7] = {
        {"U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "BOOL", "U8"},
        {"F16", "BF16", "I16", "U16", "F16", "BF16", "I16"},
        {"F32", "I32", "U32", "F32", "I32", "U32", "I32"},
        {"F64", "I64", "U64", "F64", "I64", "U64", "I64"}};
    const auto it = Any(golden_.tensors);
    for (const auto& types : kTypes) {
      if (!absl::c_linear_search(types, it->second.dtype)) continue;
      redefines_ = true;
      it->second.dtype = types[Below(std::size(types))];
      return Touch("retype to " + it->second.dtype, it->first);
    }
  }

  void Copy() {
    const auto it = Any(golden_.tensors);
    const std::string other = OtherName(it->first);
    const TestTensor tensor = it->second;
    Touch("copy", it->first);
    Touch(" to", other);
    Put(other, tensor);
  }

  void Add() {
    const auto it = Any(golden_.tensors);
    const size_t dot = it->first.rfind('.');
    const std::string module = dot == std::string::npos ? "" : it->first.substr(0, dot + 1);
    constexpr const char* kLast[] = {"rotation", "weight_mask", "codebook", "had_K", "perm"};
    const std::string name = module + kLast[Below(std::size(kLast))];
    golden_.tensors[name] = {"F32", {1}, "abcd"};
    Touch("add", name);
  }

  // Changes an entry of a list, or a member of an object of groups or layers.
  void ChangeSettings() {
    settings_ = true;
    std::vector<Json*> lists;
    const auto find = [&](const auto& self, Json& json, bool named) -> void {
      if (named && json.is_structured() && !json.empty()) lists.push_back(&json);
      if (!json.is_structured()) return;
      for (const auto& item : json.items()) {
        constexpr const char* kNames[] = {
            "ignore",         "targets",          "modules_to_not_convert", "skip_modules",
            "ignored_layers", "quantized_layers", "config_groups",          "dynamic",
            "extra_config",   "exclude_modules"};
        // Nothing else says which linears have a transform: with other targets they are others.
        if (item.key() == "transform_config") continue;
        self(self, item.value(), absl::c_linear_search(kNames, item.key()));
      }
    };
    for (auto& [file, json] : golden_.settings) find(find, json, false);
    if (lists.empty()) return AddEntry();
    Json& list = **Any(lists);
    const auto entry = std::next(list.begin(), static_cast<ptrdiff_t>(Below(list.size())));
    absl::StrAppend(&what_, "change ", list.dump().substr(0, 200));
    if (list.is_array()) {
      switch (Below(3)) {
        case 0:
          list.erase(entry);
          break;
        case 1:
          *entry = absl::StrCat(entry->template get<std::string>().substr(0, 2), "x");
          break;
        default:
          list.push_back(AnyPath());
      }
    } else if (Below(2) == 0) {
      list.erase(entry);
    } else {
      list[AnyPath()] = *entry;
    }
  }

  void AddEntry() {
    for (auto& [file, json] : golden_.settings) {
      Json& settings = json.contains("quantization_config") ? json["quantization_config"] : json;
      const char* const name =
          absl::StrContains(file, "hf_quant") ? "exclude_modules" : "modules_to_not_convert";
      settings[name] = Json::array({AnyPath()});
      absl::StrAppend(&what_, "add ", name, " ", AnyPath());
    }
  }

  std::string AnyPath() {
    std::string path = Any(golden_.weights)->first;
    if (Below(2) == 0) path = path.substr(path.rfind('.') + 1);
    if (Below(4) == 0) path = "model." + path;
    return path;
  }

  Golden& golden_;
  std::mt19937& random_;
  std::string what_;
  std::set<std::string> touched_;
  bool settings_ = false;
  bool redefines_ = false;
};

// Whether one of the names is of the module of one of the linear's tensors. Of such a linear the
// files may say other values now; only that it is accounted for is sure.
bool IsTouched(const Golden& golden, const std::string& path, const std::set<std::string>& names) {
  const auto it = golden.tensors_of.find(path);
  return it == golden.tensors_of.end() ||
         absl::c_any_of(it->second, [&](const std::string& tensor) {
           const std::string module = tensor.substr(0, tensor.rfind('.') + 1);
           return absl::c_any_of(names, [&](const std::string& name) {
             return absl::StartsWith(name, module.empty() ? tensor : module);
           });
         });
}

void CheckMutation(const Golden& before, const Golden& after, const Mutation& mutation,
                   const absl::StatusOr<model::Checkpoint>& checkpoint) {
  SCOPED_TRACE(absl::StrCat(before.name, ": ", mutation.what()));
  if (!checkpoint.ok()) {
    EXPECT_TRUE(absl::IsInvalidArgument(checkpoint.status()) ||
                absl::IsUnimplemented(checkpoint.status()))
        << checkpoint.status();
    EXPECT_FALSE(checkpoint.status().message().empty());
    const bool others = absl::c_any_of(before.weights, [&](const auto& weight) {
      return !IsTouched(before, weight.first, mutation.touched());
    });
    EXPECT_TRUE(mutation.settings() || !others) << "refuses others: " << checkpoint.status();
    return;
  }
  EXPECT_EQ(checkpoint->tensors().size(), after.tensors.size());
  for (const auto& [name, entry] : checkpoint->tensors()) {
    const auto tensor = before.tensors.find(std::string(name));
    const bool same =
        tensor != before.tensors.end() && !mutation.touched().contains(std::string(name));
    if (same && before.codes.contains(std::string(name))) {
      EXPECT_TRUE(entry.quantised()) << "passed over: " << name;
    }
    if (model::ParseCodes(name, *entry.info).certain) {
      EXPECT_TRUE(entry.quantised()) << "passed over: " << name;
    }
    EXPECT_FALSE(entry.served && entry.unserved != nullptr) << name;
  }
  std::set<std::string> served;
  std::vector<uint8_t> scratch;
  for (const model::LinearLocation& linear : checkpoint->linears()) {
    served.insert(linear.path);
    EXPECT_FALSE(checkpoint->unserved().contains(linear.path)) << linear.path << " is both";
    const auto weight = checkpoint->Read(linear, &scratch);
    const auto oracle = before.weights.find(linear.path);
    if (!weight.ok() || oracle == before.weights.end()) continue;
    if (mutation.redefines() && IsTouched(before, linear.path, mutation.touched())) continue;
    EXPECT_TRUE(SameValues(*weight, oracle->second)) << "other values: " << linear.path;
  }
  for (const auto& [path, reason] : checkpoint->unserved()) {
    EXPECT_TRUE(absl::IsInvalidArgument(reason) || absl::IsUnimplemented(reason)) << reason;
    EXPECT_FALSE(reason.message().empty()) << path;
  }
  for (const auto& [path, weight] : before.weights) {
    if (IsTouched(before, path, mutation.touched())) continue;
    const std::set<std::string>& tensors = before.tensors_of.at(path);
    const bool named = served.contains(path) || checkpoint->unserved().contains(path) ||
                       absl::c_any_of(checkpoint->unserved(), [&](const auto& one) {
                         return tensors.contains(one.first + ".weight_packed") ||
                                absl::StartsWith(*tensors.begin(), one.first);
                       });
    EXPECT_TRUE(named) << "neither served nor named: " << path;
  }
}

TEST(Account, EveryGoldenIsAccountedForHoweverItIsChanged) {
  const std::vector<Golden> goldens = ReadGoldens();
  ASSERT_GT(goldens.size(), 60u);
  const TempDirectory directory;
  std::mt19937 random(1);  // NOLINT: the same every time
  int opened = 0;
  const auto failures = [] {
    return ::testing::UnitTest::GetInstance()->current_test_info()->result()->total_part_count();
  };
  for (int i = 0; i < kMutations && failures() < 10; ++i) {
    const Golden& before = goldens[i % goldens.size()];
    Golden after = before;
    Mutation mutation(&after, &random);
    mutation.Apply();
    Write(after, directory);
    const auto checkpoint = Open(directory, "m");
    CheckMutation(before, after, mutation, checkpoint);
    opened += checkpoint.ok() ? 1 : 0;
    for (const auto& [file, json] : after.settings) fs::remove(directory.At("m/" + file));
  }
  EXPECT_GT(opened, kMutations / 4);
}

}  // namespace
}  // namespace awqd
