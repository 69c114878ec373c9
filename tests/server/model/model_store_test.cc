// Names, states, versions, memory and threads of the model store.
#include "server/model/model_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <thread>

#include "kernels/kernels.h"
#include "tests/server/model/test_files.h"

namespace awqd::model {
namespace {

using ::awqd::testing::AwqConfig;
using ::awqd::testing::AwqLinear;
using ::awqd::testing::Merge;
using ::awqd::testing::SafetensorsOf;
using ::awqd::testing::TempDirectory;
using ::awqd::testing::TestTensors;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
constexpr absl::StatusCode kNotFound = absl::StatusCode::kNotFound;

class ModelStoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto device = OpenDevice("cpu", {.cpu_threads = 2});
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
    store_ = std::make_unique<ModelStore>(directory_.path(), device_.get());
    WriteModel("m");
  }
  void WriteModel(const std::string& name, char fill = 0x21) {
    const TestTensors tensors = Merge(AwqLinear("layers.0.up", 64, 128, 32, fill),
                                      AwqLinear("layers.0.down", 128, 64, 32, fill));
    directory_.Write(name + "/config.json", AwqConfig());
    directory_.Write(name + "/model.safetensors", SafetensorsOf(tensors));
  }
  ModelStatus StatusOf(const std::string& name) {
    for (ModelStatus& status : store_->List()) {
      if (status.name == name) return status;
    }
    return {};
  }

  TempDirectory directory_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<ModelStore> store_;
};

TEST_F(ModelStoreTest, LoadFindUnload) {
  EXPECT_EQ(store_->Find("m").status().code(), kNotFound);
  EXPECT_EQ(StatusOf("m").state, ModelState::kUnloaded);
  const auto model = store_->Load("m");
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->version, 1);
  EXPECT_EQ((*model)->quant_method, "awq");
  EXPECT_EQ((*model)->weights.size(), 2u);
  EXPECT_GT((*model)->device_bytes, 64 * 128 / 2);
  EXPECT_EQ(device_->UsedBytes(), (*model)->device_bytes);
  EXPECT_EQ(store_->device_bytes(device_.get()), (*model)->device_bytes);
  EXPECT_EQ(*store_->Find("m"), *model);
  EXPECT_EQ(StatusOf("m").state, ModelState::kReady);
  EXPECT_TRUE(store_->FindWeight("m", "layers.0.up").ok());
  EXPECT_TRUE(store_->Unload("m").ok());
  EXPECT_EQ(store_->Unload("m").code(), kNotFound);
  EXPECT_EQ(store_->Find("m").status().code(), kNotFound);
  EXPECT_EQ(StatusOf("m").state, ModelState::kUnloaded);
  EXPECT_EQ(store_->device_bytes(device_.get()), 0);
}

TEST_F(ModelStoreTest, MemoryIsFreedWhenTheLastUserLetsGo) {
  auto weight = [&] {
    EXPECT_TRUE(store_->Load("m").ok());
    return *store_->FindWeight("m", "layers.0.up");
  }();
  EXPECT_TRUE(store_->Unload("m").ok());
  EXPECT_EQ(device_->UsedBytes(), weight->bytes());
  weight.reset();
  EXPECT_EQ(device_->UsedBytes(), 0);
}

TEST_F(ModelStoreTest, ReloadSwapsAndOldVersionLives) {
  const auto first = store_->Load("m");
  WriteModel("m", 0x65);
  const auto second = store_->Load("m");
  ASSERT_TRUE(first.ok() && second.ok()) << second.status();
  EXPECT_EQ((*second)->version, 2);
  EXPECT_EQ(*store_->Find("m"), *second);
  EXPECT_EQ((*first)->version, 1);
  EXPECT_EQ(device_->UsedBytes(), (*first)->device_bytes + (*second)->device_bytes);
}

TEST_F(ModelStoreTest, NamesThatAreRefused) {
  for (const std::string& name :
       {std::string(), std::string("."), std::string(".."), std::string("../m"),
        std::string("/etc"), std::string("m/"), std::string("m\0x", 3), std::string(" "),
        std::string("m m"), std::string(".hidden"), std::string("a\nb"), std::string(129, 'a'),
        std::string(4096, 'a'), std::string("m\xc3\xa9"), std::string("\\m"),
        std::string("%2e%2e")}) {
    EXPECT_EQ(CheckModelName(name).code(), kInvalid);
    EXPECT_EQ(store_->Load(name).status().code(), kInvalid);
    EXPECT_EQ(store_->Unload(name).code(), kInvalid);
    EXPECT_EQ(store_->Find(name).status().code(), kInvalid);
    EXPECT_EQ(store_->FindWeight(name, "w").status().code(), kInvalid);
    EXPECT_EQ(CheckModelName(name).message().find('\n'), absl::string_view::npos);
  }
  EXPECT_TRUE(CheckModelName(std::string(128, 'a')).ok());
  EXPECT_TRUE(CheckModelName("Qwen2.5-7B_Instruct-AWQ").ok());
}

TEST_F(ModelStoreTest, InventedNamesLeaveNothingBehind) {
  for (int i = 0; i < 1000; ++i) {
    EXPECT_EQ(store_->Load(absl::StrCat("none", i)).status().code(), kNotFound);
  }
  EXPECT_EQ(store_->List().size(), 1u);
}

TEST_F(ModelStoreTest, FailedFirstLoadIsShown) {
  directory_.Write("m/config.json", "{}");
  EXPECT_EQ(store_->Load("m").status().code(), kInvalid);
  const ModelStatus status = StatusOf("m");
  EXPECT_EQ(status.state, ModelState::kFailed);
  EXPECT_THAT(status.message, HasSubstr("quantization_config"));
  EXPECT_THAT(std::string(store_->Find("m").status().message()), HasSubstr("last load failed"));
  WriteModel("m");
  EXPECT_TRUE(store_->Load("m").ok());
  EXPECT_EQ(StatusOf("m").message, "");
}

// Names on disk are any bytes, but what is told of them travels as UTF-8.
TEST_F(ModelStoreTest, MessagesAreShortUtf8) {
  directory_.Write("m/caf\xe9.safetensors", "no checkpoint");
  EXPECT_FALSE(store_->Load("m").ok());
  EXPECT_THAT(StatusOf("m").message, HasSubstr("m/caf\\xe9.safetensors: "));
  std::filesystem::remove(directory_.At("m/caf\xe9.safetensors"));

  // The cut at 1024 bytes would fall within a character of two.
  std::string text = "x";
  while (text.size() < 2000) text += "\xc3\xa9";
  store_->set_before_serving([&](const Model&) { return absl::InternalError(text); });
  EXPECT_FALSE(store_->Load("m").ok());
  EXPECT_EQ(StatusOf("m").message, text.substr(0, 1023));
}

TEST_F(ModelStoreTest, FailedReloadKeepsServing) {
  const auto first = store_->Load("m");
  ASSERT_TRUE(first.ok());
  ASSERT_EQ(truncate(directory_.At("m/model.safetensors").c_str(), 1000), 0);
  EXPECT_EQ(store_->Load("m").status().code(), kInvalid);
  EXPECT_EQ(*store_->Find("m"), *first);
  EXPECT_EQ(StatusOf("m").state, ModelState::kReady);
  EXPECT_THAT(StatusOf("m").message, HasSubstr("m/model.safetensors"));
  EXPECT_EQ(device_->UsedBytes(), (*first)->device_bytes);
}

TEST_F(ModelStoreTest, LargerThanTheBudget) {
  const auto first = store_->Load("m");
  ASSERT_TRUE(first.ok());
  const int64_t used = device_->UsedBytes();
  // From one byte of room to one byte too few: refused up front, and after some weights.
  for (int64_t room : {int64_t{1}, used / 2, used - 1}) {
    device_->SetBudget(used + room);
    const auto second = store_->Load("m");
    EXPECT_EQ(second.status().code(), absl::StatusCode::kResourceExhausted) << second.status();
    EXPECT_EQ(device_->UsedBytes(), used);
    EXPECT_EQ(*store_->Find("m"), *first);
  }
  device_->SetBudget(2 * used);
  EXPECT_TRUE(store_->Load("m").ok());
}

TEST_F(ModelStoreTest, HugeSparseFileIsRefusedBeforeItIsRead) {
  const int64_t k = int64_t{1} << 38;
  const std::string header = absl::StrCat(
      "{\"w.qweight\":{\"dtype\":\"I32\",\"shape\":[", k, ",1],\"data_offsets\":[0,", 4 * k,
      "]},\"w.qzeros\":{\"dtype\":\"I32\",\"shape\":[0],\"data_offsets\":[", 4 * k, ",", 4 * k,
      "]},\"w.scales\":{\"dtype\":\"F16\",\"shape\":[0],\"data_offsets\":[", 4 * k, ",", 4 * k,
      "]}}");
  directory_.Write("m/model.safetensors", awqd::testing::Safetensors(header, ""));
  const std::string path = directory_.At("m/model.safetensors");
  if (truncate(path.c_str(), 8 + static_cast<int64_t>(header.size()) + 4 * k) != 0) {
    GTEST_SKIP() << "the temporary directory's file system has no sparse files of 1 TiB";
  }
  EXPECT_EQ(store_->Load("m").status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(device_->UsedBytes(), 0);
}

TEST_F(ModelStoreTest, AHundredFailingLoadsLeaveMemoryUnchanged) {
  // The second of two weights is bad, so that every load has something to free.
  TestTensors tensors = Merge(AwqLinear("a", 64, 128, 32), AwqLinear("b", 64, 128, 64));
  directory_.Write("m/model.safetensors", SafetensorsOf(tensors));
  for (int i = 0; i < 100; ++i) {
    const auto model = store_->Load("m");
    EXPECT_EQ(model.status().code(), kInvalid);
    EXPECT_THAT(std::string(model.status().message()),
                HasSubstr("weight \"b\": tensor \"scales\""));
    EXPECT_EQ(device_->UsedBytes(), 0);
  }
  int64_t open_files = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    open_files += entry.is_symlink();
  }
  EXPECT_LT(open_files, 50);
}

TEST_F(ModelStoreTest, MissingWeightNamesSimilarOnes) {
  TestTensors tensors;
  for (int i = 0; i < 8; ++i) {
    tensors = Merge(tensors, AwqLinear(absl::StrCat("layers.", i, ".up"), 32, 8, 32));
    tensors = Merge(tensors, AwqLinear(absl::StrCat("layers.", i, ".down"), 32, 8, 32));
  }
  directory_.Write("m/model.safetensors", SafetensorsOf(tensors));
  ASSERT_TRUE(store_->Load("m").ok());
  const auto weight = store_->FindWeight("m", "layers.3.upp\n");
  EXPECT_EQ(weight.status().code(), kNotFound);
  EXPECT_THAT(std::string(weight.status().message()),
              HasSubstr("no weight \"layers.3.upp\\n\" among 16; there are \"layers.3.up\", "));
}

TEST_F(ModelStoreTest, DiscoverListsDirectoriesWithAConfig) {
  WriteModel("b");
  directory_.Write("goldens/cases.json", "{}");
  directory_.Write("file.txt", "");
  directory_.Write(".cache/config.json", "{}");
  directory_.Write("bad name/config.json", "{}");
  std::filesystem::create_symlink("b", directory_.At("alias"));
  std::filesystem::create_symlink("/etc", directory_.At("outside"));
  std::filesystem::create_symlink("nothing", directory_.At("dangling"));
  const auto found = store_->Discover();
  ASSERT_TRUE(found.ok()) << found.status();
  const absl::Status ok;
  EXPECT_THAT(*found, ElementsAre(Pair("alias", ok), Pair("b", ok), Pair("m", ok),
                                  Pair("outside", ::testing::Not(ok))));
  EXPECT_TRUE(store_->Load("alias").ok());
}

TEST_F(ModelStoreTest, ADirectoryThatCannotBeOpenedIsListedWithTheReason) {
  std::filesystem::create_directory_symlink(directory_.At("m"), directory_.At("outside"));
  const ModelStatus status = StatusOf("outside");
  EXPECT_EQ(status.state, ModelState::kFailed);
  EXPECT_THAT(status.message, HasSubstr("outside/config.json"));
  EXPECT_THAT(status.message, HasSubstr("leads out of the model repository"));
  EXPECT_EQ(StatusOf("m").state, ModelState::kUnloaded);
  EXPECT_EQ(store_->Load("outside").status().code(), kInvalid);
}

TEST_F(ModelStoreTest, MissingRoot) {
  ModelStore store(directory_.At("later"), device_.get());
  EXPECT_EQ(store.Discover().status().code(), kNotFound);
  EXPECT_EQ(store.Load("m").status().code(), kNotFound);
  EXPECT_TRUE(store.List().empty());
  WriteModel("later/m");
  EXPECT_TRUE(store.Load("m").ok());
}

TEST_F(ModelStoreTest, CancelledLoadsAreUnavailable) {
  const auto first = store_->Load("m");
  ASSERT_TRUE(first.ok());
  store_->CancelLoads();
  EXPECT_EQ(store_->Load("m").status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(*store_->Find("m"), *first);
}

TEST_F(ModelStoreTest, WhatIsServedIsNotLoadedAgain) {
  const auto first = store_->LoadUnlessServed("m");
  ASSERT_TRUE(first.ok()) << first.status();
  device_->SetBudget(device_->UsedBytes());  // no room for two
  const auto second = store_->LoadUnlessServed("m");
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(*second, *first);
  EXPECT_EQ(store_->LoadUnlessServed("none").status().code(), kNotFound);
  EXPECT_EQ(store_->LoadUnlessServed("../m").status().code(), kInvalid);
}

// The load of another thread is held where it is about to be served, and then ends well or badly.
TEST_F(ModelStoreTest, ALoadInProgressIsWaitedFor) {
  for (const bool fails : {false, true}) {
    std::promise<void> begun, release;
    std::atomic<int> loads{0};
    store_->set_before_serving([&](const Model&) -> absl::Status {
      if (loads++ > 0) return absl::OkStatus();
      begun.set_value();
      release.get_future().wait();
      return fails ? absl::InternalError("the first load fails") : absl::OkStatus();
    });
    auto theirs = std::async(std::launch::async, [&] { return store_->Load("m"); });
    begun.get_future().wait();
    EXPECT_EQ(store_->Load("m").status().code(), absl::StatusCode::kAlreadyExists);
    auto ours = std::async(std::launch::async, [&] { return store_->LoadUnlessServed("m"); });
    release.set_value();
    const auto model = ours.get();
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ(theirs.get().ok(), !fails);
    EXPECT_EQ(loads, fails ? 2 : 1);
    EXPECT_TRUE(store_->Unload("m").ok());
  }
}

TEST_F(ModelStoreTest, WhoWaitsForALoadHearsOfTheEnd) {
  std::promise<void> begun, release;
  store_->set_before_serving([&](const Model&) {
    begun.set_value();
    release.get_future().wait();
    return absl::OkStatus();
  });
  auto theirs = std::async(std::launch::async, [&] { return store_->Load("m"); });
  begun.get_future().wait();
  auto ours = std::async(std::launch::async, [&] { return store_->LoadUnlessServed("m"); });
  store_->CancelLoads();
  EXPECT_EQ(ours.get().status().code(), absl::StatusCode::kUnavailable);
  release.set_value();
  EXPECT_TRUE(theirs.get().ok());
}

TEST_F(ModelStoreTest, EightThreadsLoadAndUnloadWhileOthersUseIt) {
  WriteModel("m", 0x22);  // every code the same, so that a torn weight would show
  std::atomic<bool> stop{false};
  std::atomic<int> loads{0}, uses{0}, unexpected{0};
  const auto allowed = [&](const absl::Status& status,
                           std::initializer_list<absl::StatusCode> codes) {
    if (status.ok()) return;
    for (absl::StatusCode code : codes) {
      if (status.code() == code) return;
    }
    ++unexpected;
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 40; ++round) {
        const auto model = store_->Load("m");
        loads += model.ok();
        allowed(model.status(), {absl::StatusCode::kAlreadyExists});
        if (round % 3 == i % 3) allowed(store_->Unload("m"), {kNotFound});
        EXPECT_LE(store_->List().size(), 1u);
      }
    });
  }
  std::vector<std::thread> users;
  for (int i = 0; i < 2; ++i) {
    users.emplace_back([&] {
      while (!stop) {
        const auto weight = store_->FindWeight("m", "layers.0.up");
        allowed(weight.status(), {kNotFound, absl::StatusCode::kUnavailable});
        if (!weight.ok()) continue;
        std::vector<uint16_t> out(64 * 128);
        const MatrixView view = {out.data(), DType::kFp16, 64, 128};
        allowed(Dequantize({.weight = (*weight)->parts[0].weight.get(), .out = view}, StreamView{}),
                {});
        if (out.front() != out.back()) ++unexpected;
        ++uses;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(store_->Load("m").ok());
  while (uses == 0) std::this_thread::yield();
  stop = true;
  for (std::thread& user : users) user.join();
  EXPECT_EQ(unexpected, 0);
  EXPECT_GT(loads, 0);
  EXPECT_TRUE(store_->Unload("m").ok());
  EXPECT_EQ(device_->UsedBytes(), 0);
}

// Three devices with the room that the test gives them.
class ShardedStoreTest : public ModelStoreTest {
 protected:
  void SetUp() override {
    ModelStoreTest::SetUp();
    for (int i = 0; i < 3; ++i) {
      auto device = OpenDevice(absl::StrCat("cpu:", i), {.cpu_threads = 1});
      ASSERT_TRUE(device.ok()) << device.status();
      own_.push_back(*std::move(device));
      devices_.push_back(own_.back().get());
    }
  }
  std::unique_ptr<ModelStore> Store(Sharding sharding) {
    return std::make_unique<ModelStore>(directory_.path(), devices_, sharding);
  }
  int64_t Used() const {
    int64_t used = 0;
    for (const Device* device : devices_) used += device->UsedBytes();
    return used;
  }

  std::vector<std::unique_ptr<Device>> own_;
  std::vector<Device*> devices_;
};

TEST_F(ShardedStoreTest, ReplicasAreWholeOnEveryDevice) {
  const auto store = Store(Sharding::kReplicas);
  const auto model = store->Load("m");
  ASSERT_TRUE(model.ok()) << model.status();
  const auto weight = store->FindWeight("m", "layers.0.up");
  ASSERT_TRUE(weight.ok());
  EXPECT_FALSE((*weight)->cut());
  EXPECT_EQ((*weight)->devices(), "cpu:0,cpu:1,cpu:2");
  for (const Device* device : devices_) {
    EXPECT_EQ(device->UsedBytes(), (*model)->device_bytes / 3);
    EXPECT_EQ(store->device_bytes(device), device->UsedBytes());
  }
  EXPECT_TRUE(store->Unload("m").ok());
  EXPECT_EQ(store->device_bytes(devices_[1]), 0);
}

TEST_F(ShardedStoreTest, ColumnsAreSharedOut) {
  const auto store = Store(Sharding::kColumns);
  const auto model = store->Load("m");
  ASSERT_TRUE(model.ok()) << model.status();
  const auto weight = store->FindWeight("m", "layers.0.up");
  ASSERT_TRUE(weight.ok());
  EXPECT_TRUE((*weight)->cut());
  EXPECT_EQ((*weight)->shape.n, 128);
  EXPECT_EQ(Used(), (*model)->device_bytes);
  for (const Device* device : devices_) {
    EXPECT_EQ(store->device_bytes(device), device->UsedBytes());
    EXPECT_GT(device->UsedBytes(), Used() / 4);
  }
}

TEST_F(ShardedStoreTest, ModelsLiveOnTheEmptiestDevice) {
  const auto store = Store(Sharding::kModels);
  devices_[0]->SetBudget(1 << 20);
  devices_[1]->SetBudget(1 << 22);
  devices_[2]->SetBudget(1 << 21);
  const auto model = store->Load("m");
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(devices_[1]->UsedBytes(), (*model)->device_bytes);
  EXPECT_EQ(Used(), (*model)->device_bytes);
}

// Whichever device runs out, and after however many weights.
TEST_F(ShardedStoreTest, ALoadThatFailsOnOneDeviceFreesAll) {
  for (Sharding sharding : {Sharding::kReplicas, Sharding::kColumns}) {
    const auto store = Store(sharding);
    const auto first = store->Load("m");
    ASSERT_TRUE(first.ok()) << first.status();
    const int64_t used = Used();
    for (Device* device : devices_) {
      const int64_t on_device = device->UsedBytes();
      for (int64_t room : {int64_t{1}, on_device / 2 + 600, on_device - 1}) {
        device->SetBudget(on_device + room);
        const auto second = store->Load("m");
        EXPECT_EQ(second.status().code(), absl::StatusCode::kResourceExhausted) << second.status();
        EXPECT_THAT(std::string(second.status().message()), HasSubstr(device->info().id));
        EXPECT_EQ(std::string(second.status().message()).find("--shard=") != std::string::npos,
                  sharding == Sharding::kReplicas);
        EXPECT_EQ(Used(), used);
        EXPECT_EQ(*store->Find("m"), *first);
      }
      device->SetBudget(0);
    }
    EXPECT_TRUE(store->Load("m").ok());
    EXPECT_TRUE(store->Unload("m").ok());
  }
  EXPECT_EQ(Used(), 0);
}

TEST_F(ShardedStoreTest, ColumnsFitWhereReplicasDoNot) {
  const int64_t whole = [&] {
    const auto model = store_->Load("m");
    return (*model)->device_bytes;
  }();
  for (Device* device : devices_) device->SetBudget(whole / 2);
  EXPECT_EQ(Store(Sharding::kReplicas)->Load("m").status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Used(), 0);
  const auto store = Store(Sharding::kColumns);
  EXPECT_TRUE(store->Load("m").ok());
  for (Device* device : devices_) device->SetBudget(10);
  const auto status = store->Load("m").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("on cpu:0 + cpu:1 + cpu:2, got 0 free"));
}

TEST(ProgressTest, ALineAtMostEveryTwoSeconds) {
  absl::Time now = absl::UnixEpoch();
  std::vector<std::string> lines;
  Progress progress(
      "m", 100 << 20, 10, [&](absl::string_view line) { lines.emplace_back(line); },
      [&] { return now; });
  for (int i = 0; i < 9; ++i) {
    now += absl::Milliseconds(500);
    progress.Add(10 << 20);
  }
  EXPECT_THAT(lines,
              ElementsAre("loading model \"m\": 4 of 10 weights, 40 of 100 MiB (40 %), 20 MiB/s",
                          "loading model \"m\": 8 of 10 weights, 80 of 100 MiB (80 %), 20 MiB/s"));
  Progress silent("m", 1, 1, nullptr, [&] { return now; });
  now += absl::Seconds(9);
  silent.Add(1);
  EXPECT_EQ(silent.elapsed(), absl::Seconds(9));
}

}  // namespace
}  // namespace awqd::model
