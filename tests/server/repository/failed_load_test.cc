// Loads that fail: their error, the version that stays served, and that nothing is kept.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <new>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "server/model/model_loader.h"
#include "server/repository/model_store.h"
#include "tests/server/repository/model_store_fixture.h"
#include "tests/testing/wrapped_device.h"

namespace awqd::repository {
namespace {

using ::awqd::testing::AwqLinear;
using ::awqd::testing::Merge;
using ::awqd::testing::SafetensorsOf;
using ::awqd::testing::TestTensors;
using ::testing::HasSubstr;

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

TEST_F(ModelStoreTest, AModelOfTooManyWeightsIsRefusedBeforeAnyIsRead) {
  const ModelFolder folder = *ModelFolders(directory_.path()).Locate("m");
  const std::atomic<bool> cancelled{false};
  model::LoadTarget target = {.devices = {device_.get()}, .max_weights = 1};
  const absl::Status status =
      model::LoadModel(*folder.root, folder.path, "m", target, cancelled, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(), "model \"m\": got 2 quantised linears, expected at most 1");
  EXPECT_EQ(device_->UsedBytes(), 0);
  target.max_weights = 2;
  EXPECT_TRUE(model::LoadModel(*folder.root, folder.path, "m", target, cancelled, {}).ok());
}

// --- Linears that cannot be read ---

// One linear that is served, one that lost a tensor, and one that does not decode.
class UnservedTest : public ModelStoreTest {
 protected:
  void SetUp() override {
    ModelStoreTest::SetUp();
    TestTensors tensors = Merge(AwqLinear("a.up", 64, 128, 32), AwqLinear("b.up", 64, 128, 32));
    tensors = Merge(tensors, AwqLinear("c.experts.0.up", 64, 128, 32));
    tensors.erase("b.up.qzeros");
    tensors["c.experts.0.up.scales"].bytes.replace(0, 2, "\x01\x7e");  // NaN
    directory_.Write("m/model.safetensors", SafetensorsOf(tensors));
  }
  static void ExpectReason(const absl::Status& status, const std::string& says) {
    EXPECT_EQ(status.code(), kInvalid) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(says));
  }
};

TEST_F(UnservedTest, TheOthersAreServedAndEachHasItsReason) {
  const auto model = store_->Load("m");
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->weights.size(), 1u);
  EXPECT_EQ((*model)->unserved.size(), 2u);
  EXPECT_EQ((*model)->ignored_tensors, 0);
  EXPECT_EQ(device_->UsedBytes(), (*model)->device_bytes);
  EXPECT_TRUE(store_->FindWeight("m", "a.up").ok());
  ExpectReason(store_->FindWeight("m", "b.up").status(),
               "\"b.up\" is not served: m: weight \"b.up\": tensor \"qzeros\" is missing");
  ExpectReason(store_->FindWeight("m", "c.experts.0.up").status(), "\"scales\": got NaN");
  ExpectReason(store_->FindStack("m", "c.experts.*.up").status(), "\"scales\": got NaN");
  EXPECT_TRUE(absl::IsNotFound(store_->FindWeight("m", "d.up").status()));
  const ModelStatus status = StatusOf("m");
  EXPECT_EQ(status.state, ModelState::kReady);
  EXPECT_THAT(status.message, HasSubstr("2 of 3 quantised weights are not served: "));
  EXPECT_THAT(status.message, HasSubstr("\"qzeros\" is missing"));
}

TEST_F(UnservedTest, AllWeightsMayBeRequired) {
  ExpectReason(store_->Load("m", /*require_all_weights=*/true).status(),
               "all weights are required, and 2 quantised weights are not served");
  EXPECT_EQ(device_->UsedBytes(), 0);
  ASSERT_TRUE(store_->Load("m").ok());
  store_->set_require_all_weights(true);
  EXPECT_FALSE(store_->Load("m").ok());
  EXPECT_FALSE(store_->Reconcile("m").ok());
  EXPECT_TRUE(store_->FindWeight("m", "a.up").ok()) << "the version before is served on";
  WriteModel("m");
  EXPECT_TRUE(store_->Load("m").ok());
}

TEST_F(UnservedTest, AModelWithoutAnyThatCanBeReadFails) {
  TestTensors tensors = AwqLinear("b.up", 64, 128, 32);
  tensors.erase("b.up.qzeros");
  directory_.Write("m/model.safetensors", SafetensorsOf(tensors));
  ExpectReason(store_->Load("m").status(), "tensor \"qzeros\" is missing");
  EXPECT_EQ(StatusOf("m").state, ModelState::kFailed);
}

// Names on disk are any bytes, but messages about them are UTF-8.
TEST_F(ModelStoreTest, MessagesAreShortUtf8) {
  directory_.Write("m/caf\xe9.safetensors", "no checkpoint");
  EXPECT_FALSE(store_->Load("m").ok());
  EXPECT_THAT(StatusOf("m").message, HasSubstr("m/caf\\xe9.safetensors: "));
  std::filesystem::remove(directory_.At("m/caf\xe9.safetensors"));

  // The cut at 1024 bytes would fall within a two-byte character.
  std::string text = "x";
  while (text.size() < 2000) text += "\xc3\xa9";
  store_->set_before_serving([&](const model::Model&) { return absl::InternalError(text); });
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

// A thread that cannot be started throws std::system_error, and lack of memory std::bad_alloc.
TEST_F(ModelStoreTest, ALoadThatThrowsEnds) {
  store_->set_before_serving([](const model::Model&) -> absl::Status {
    throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
  });
  const absl::Status thrown = store_->Load("m").status();
  EXPECT_EQ(thrown.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(thrown.message()), HasSubstr("model \"m\": Resource temporarily"));
  store_->set_before_serving([](const model::Model&) -> absl::Status { throw std::bad_alloc(); });
  EXPECT_EQ(store_->Load("m").status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(device_->UsedBytes(), 0);
  store_->set_before_serving([](const model::Model&) { return absl::OkStatus(); });
  EXPECT_TRUE(store_->Load("m").ok());
}

TEST_F(ModelStoreTest, LargerThanTheBudget) {
  const auto first = store_->Load("m");
  ASSERT_TRUE(first.ok());
  const int64_t used = device_->UsedBytes();
  // From one byte of room to one byte too few: refused at once, and after some weights.
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

// A writer that puts the time of modification back, after one weight was read and before the other
// is: the load would serve a mixture. The time of change tells.
TEST_F(ModelStoreTest, AFileWrittenDuringALoadThoughItsModificationTimeIsPutBack) {
  const std::string path = directory_.At("m/model.safetensors");
  struct stat before = {};
  ASSERT_EQ(stat(path.c_str(), &before), 0);
  const int fd = open(path.c_str(), O_WRONLY);
  ASSERT_GE(fd, 0);
  awqd::testing::WrappedDevice device(*OpenDevice("cpu", {.cpu_threads = 1}), true);
  ModelStore store(directory_.path(), &device);
  ASSERT_TRUE(store.Load("m").ok());
  std::atomic<int64_t> allocations = 0;  // both readers of the load allocate
  device.OnAllocate([&] {
    if (++allocations != 2) return;
    EXPECT_EQ(pwrite(fd, "e", 1, before.st_size - 1), 1);
    const timespec times[2] = {before.st_atim, before.st_mtim};
    EXPECT_EQ(futimens(fd, times), 0);
  });
  const absl::Status status = store.Load("m").status();
  close(fd);
  EXPECT_EQ(allocations, 2);
  EXPECT_EQ(status.code(), kInvalid);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("m/model.safetensors: the file was written to, or its attributes changed, "
                        "while it was loaded"));
}

TEST_F(ModelStoreTest, AHundredFailingLoadsLeaveMemoryUnchanged) {
  // The second of two weights is bad, and is missed when the first is on its device: every load has
  // something to free.
  store_->set_before_serving([](const model::Model& model) { return model.CheckAllServed(); });
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

}  // namespace
}  // namespace awqd::repository
