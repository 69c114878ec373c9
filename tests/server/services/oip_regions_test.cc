// Regions of shared memory of the inference protocol: the table, and requests that name them.
#include <signal.h>
#include <sys/wait.h>

#include "server/services/oip/regions.h"
#include "tests/server/services/oip_fixture.h"
#include "tests/server/services/shared_object.h"

namespace awqd::services {
namespace {

using oip::Region, oip::Regions;
using ::testing::HasSubstr;

TEST(RegionsTest, EachOwnerHasItsOwn) {
  Regions regions(nullptr);
  ASSERT_TRUE(regions.Register("ann", {"r", "key-a", 0, 10}).ok());
  ASSERT_TRUE(regions.Register("bob", {"r", "key-b", 0, 20}).ok());
  EXPECT_EQ(regions.Register("ann", {"r", "key-c", 0, 10}).code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_EQ((*regions.List("ann", ""))[0].key, "key-a");
  EXPECT_EQ((*regions.List("bob", "r"))[0].key, "key-b");
  EXPECT_EQ(regions.List("ann", "q").status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(regions.List("eve", "")->empty());
  regions.Unregister("ann", "");
  EXPECT_TRUE(regions.List("ann", "")->empty());
  EXPECT_EQ(regions.List("bob", "")->size(), 1u);
  regions.Unregister("bob", "other");
  regions.Unregister("bob", "r");
  EXPECT_TRUE(regions.List("bob", "")->empty());
}

TEST(RegionsTest, AreBounded) {
  Regions regions(nullptr);
  for (size_t i = 0; i < Regions::kMaxRegions; ++i) {
    ASSERT_TRUE(regions.Register("ann", {std::to_string(i), "key", 0, 1}).ok());
  }
  EXPECT_EQ(regions.Register("ann", {"more", "key", 0, 1}).code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(regions.Register("bob", {"more", "key", 0, 1}).ok());
  regions.Unregister("ann", "7");
  EXPECT_TRUE(regions.Register("ann", {"more", "key", 0, 1}).ok());
  EXPECT_EQ(regions.Register("bob", {"", "key", 0, 1}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(regions.Register("bob", {std::string(129, 'n'), "key", 0, 1}).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(RegionsTest, ARangeLiesWithinItsRegion) {
  Regions regions(nullptr);
  ASSERT_TRUE(regions.Register("", {"r", "key", 100, 50}).ok());
  const auto resolve = [&](int64_t offset, int64_t size, v1::SharedMemory* range) {
    range->set_name("r");
    range->set_offset(offset);
    range->set_size(size);
    return regions.Resolve("", "x", range);
  };
  v1::SharedMemory range;
  ASSERT_TRUE(resolve(20, 30, &range).ok());
  EXPECT_EQ(range.name(), "key");
  EXPECT_EQ(range.offset(), 120);
  EXPECT_THAT(std::string(resolve(21, 30, &range).message()),
              HasSubstr("x.size: got 30 from byte 21 on, expected a range within the region's 50"));
  EXPECT_FALSE(resolve(INT64_MAX, 1, &range).ok());
  EXPECT_FALSE(resolve(0, INT64_MAX, &range).ok());
  EXPECT_TRUE(resolve(50, 0, &range).ok());
}

// A client that died does not unregister its regions.
TEST(RegionsTest, ThoseWhoseObjectIsGoneAreDropped) {
  const std::string prefix = "awqd-regions-" + std::to_string(getpid()) + "-";
  const auto memory = *SharedMemory::Create({.prefixes = {prefix}});
  Regions regions(memory.get());
  SharedObject dead(prefix + "dead", "d"), alive(prefix + "alive", "a");
  const auto region = [&](const std::string& name, const std::string& key) {
    return Region{name, key, 0, 1, memory->Identify(key)};
  };
  ASSERT_TRUE(regions.Register("", region("r", dead.name())).ok());
  ASSERT_TRUE(regions.Register("", region("s", alive.name())).ok());
  EXPECT_EQ(regions.Register("", region("r", alive.name())).code(),
            absl::StatusCode::kAlreadyExists);
  dead.Unlink();
  EXPECT_EQ(regions.List("", "r").status().code(), absl::StatusCode::kNotFound);
  ASSERT_EQ(regions.List("", "")->size(), 1u);
  EXPECT_TRUE(regions.Register("", region("r", alive.name())).ok()) << "the name is free again";
  // The next client makes an object of the same name.
  alive.Unlink();
  const SharedObject next(alive.name(), "n");
  EXPECT_TRUE(regions.Register("", region("s", next.name())).ok());
  EXPECT_EQ(regions.List("", "")->size(), 1u);
}

// The kernel does not remove what a killed process leaves in /dev/shm.
TEST(RegionsTest, AKilledClientIsFollowedByTheNext) {
  const std::string prefix = "awqd-killed-" + std::to_string(getpid()) + "-";
  const auto memory = *SharedMemory::Create({.prefixes = {prefix}});
  Regions regions(memory.get());
  const std::string key = prefix + "x";
  const pid_t client = fork();
  if (client == 0) {
    shm_open(("/" + key).c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
    while (true) pause();
  }
  ASSERT_TRUE(Eventually([&] { return memory->Identify(key).has_value(); }));
  const auto region = [&](int64_t size) {
    return Region{"r", key, 0, size, memory->Identify(key)};
  };
  ASSERT_TRUE(regions.Register("ann", region(8)).ok());
  kill(client, SIGKILL);
  ASSERT_EQ(waitpid(client, nullptr, 0), client);
  EXPECT_EQ(regions.size(), 1u);
  EXPECT_TRUE(regions.Register("ann", region(8)).ok()) << "as the killed client did";
  EXPECT_EQ(regions.Register("ann", region(9)).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(regions.size(), 1u);
  // The next client cleans up first, with another name of its own.
  shm_unlink(("/" + key).c_str());
  const SharedObject next(prefix + "y", "y");
  EXPECT_TRUE(
      regions.Register("ann", {"r", next.name(), 0, 1, memory->Identify(next.name())}).ok());
  EXPECT_EQ(regions.size(), 1u);
}

// An owner whose clients all died never comes back.
TEST(RegionsTest, OthersDropWhatAnOwnerLeaves) {
  const std::string prefix = "awqd-left-" + std::to_string(getpid()) + "-";
  const auto memory = *SharedMemory::Create({.prefixes = {prefix}});
  Regions regions(memory.get());
  SharedObject dead(prefix + "dead", "d");
  const SharedObject alive(prefix + "alive", "a");
  for (const char* owner : {"ann", "zoe"}) {
    ASSERT_TRUE(
        regions.Register(owner, {"r", dead.name(), 0, 1, memory->Identify(dead.name())}).ok());
  }
  dead.Unlink();
  for (const char* name : {"a", "b", "c"}) {
    ASSERT_TRUE(
        regions.Register("bob", {name, alive.name(), 0, 1, memory->Identify(alive.name())}).ok());
  }
  EXPECT_EQ(regions.size(), 3u);
}

class OipSharedMemoryTest : public OipTest {
 protected:
  void Configure(Options* options) override { options->shared_memory = {.prefixes = {prefix_}}; }

  grpc::Status Register(const std::string& key, uint64_t offset, uint64_t size) {
    inference::SystemSharedMemoryRegisterRequest request;
    request.set_name("r");
    request.set_key(key);
    request.set_offset(offset);
    request.set_byte_size(size);
    inference::SystemSharedMemoryRegisterResponse response;
    return Call(&Stub::SystemSharedMemoryRegister, request, &response);
  }

  template <typename Map>
  static void Place(Map* parameters, int64_t offset, int64_t size) {
    (*parameters)["shared_memory_region"].set_string_param("r");
    (*parameters)["shared_memory_offset"].set_int64_param(offset);
    (*parameters)["shared_memory_byte_size"].set_int64_param(size);
  }

  // Two tokens, read from byte 64 of the region and answered at 1024.
  static inference::ModelInferRequest Shared() {
    inference::ModelInferRequest request = GoodInfer();
    request.clear_raw_input_contents();
    Place(request.mutable_inputs(0)->mutable_parameters(), 64, 512);
    request.add_outputs()->set_name("y");
    Place(request.mutable_outputs(0)->mutable_parameters(), 1024, 100);
    return request;
  }

  const std::string prefix_ = "awqd-oip-" + std::to_string(getpid()) + "-";
  SharedObject object_{prefix_ + "object", std::string(8192, 'o')};
};

TEST_F(OipSharedMemoryTest, TensorsLieInARegion) {
  ASSERT_TRUE(Register("/" + object_.name(), 4096, 4096).ok());
  object_.Set(4096 + 64, std::string(512, 'x'));
  const inference::ModelInferResponse response = Answered(Shared());
  EXPECT_EQ(response.raw_output_contents_size(), 0);
  const auto& output = response.outputs(0);
  EXPECT_EQ(output.parameters().at("shared_memory_region").string_param(), "r");
  EXPECT_EQ(output.parameters().at("shared_memory_offset").int64_param(), 1024);
  EXPECT_EQ(output.parameters().at("shared_memory_byte_size").int64_param(), 2 * 16 * 2);
  EXPECT_EQ(std::string(engine_.last_matmul().x.view()), std::string(512, 'x'));
  EXPECT_TRUE(Eventually([&] { return server_->open_shared_ranges() == 0; }));

  inference::SystemSharedMemoryStatusResponse status;
  ASSERT_TRUE(
      Call(&Stub::SystemSharedMemoryStatus, inference::SystemSharedMemoryStatusRequest(), &status)
          .ok());
  EXPECT_EQ(status.regions().at("r").key(), object_.name());
  EXPECT_EQ(status.regions().at("r").offset(), 4096u);
  inference::SystemSharedMemoryUnregisterResponse unregistered;
  ASSERT_TRUE(Call(&Stub::SystemSharedMemoryUnregister,
                   inference::SystemSharedMemoryUnregisterRequest(), &unregistered)
                  .ok());
  ExpectRefused(Shared(),
                "inputs[x].parameters[shared_memory_region]: got \"r\", expected the name");
}

TEST_F(OipSharedMemoryTest, WhatCannotWorkIsRefused) {
  EXPECT_THAT(Register("/elsewhere", 0, 8).error_message(),
              HasSubstr("key: got a name that is not allowed"));
  EXPECT_THAT(Register(object_.name(), 0, 8193).error_message(),
              HasSubstr("key: got a range that cannot be used"));
  EXPECT_THAT(Register(object_.name(), uint64_t{1} << 63, 1).error_message(),
              HasSubstr("offset: got 9223372036854775808, expected less than 2^63"));
  ASSERT_TRUE(Register(object_.name(), 0, 1100).ok());
  EXPECT_EQ(Register(object_.name(), 0, 8).error_code(), grpc::StatusCode::ALREADY_EXISTS);
  ExpectRefused(Shared(), "outputs[0].parameters[shared_memory_byte_size]: got 100 from byte 1024");
  inference::ModelInferRequest request = Shared();
  Place(request.mutable_inputs(0)->mutable_parameters(), 64, 511);
  Place(request.mutable_outputs(0)->mutable_parameters(), 0, 64);
  ExpectRefused(request, "inputs[x].parameters[shared_memory_byte_size]: got 511, expected 512");
  Place(request.mutable_inputs(0)->mutable_parameters(), 64, 512);
  Place(request.mutable_outputs(0)->mutable_parameters(), 0, 63);
  ExpectRefused(request,
                "outputs[0].parameters[shared_memory_byte_size]: got 63, expected at least");
}

TEST_F(OipTest, SharedMemoryIsOffByDefault) {
  // Clients that do not use it list and unregister regions as well.
  inference::SystemSharedMemoryStatusResponse status;
  EXPECT_TRUE(
      Call(&Stub::SystemSharedMemoryStatus, inference::SystemSharedMemoryStatusRequest(), &status)
          .ok());
  inference::SystemSharedMemoryUnregisterResponse unregistered;
  EXPECT_TRUE(Call(&Stub::SystemSharedMemoryUnregister,
                   inference::SystemSharedMemoryUnregisterRequest(), &unregistered)
                  .ok());
  inference::SystemSharedMemoryRegisterResponse registered;
  EXPECT_EQ(Call(&Stub::SystemSharedMemoryRegister, inference::SystemSharedMemoryRegisterRequest(),
                 &registered)
                .error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
  inference::ModelInferRequest request = GoodInfer();
  request.clear_raw_input_contents();
  (*request.mutable_inputs(0)->mutable_parameters())["shared_memory_region"].set_string_param("r");
  (*request.mutable_inputs(0)->mutable_parameters())["shared_memory_byte_size"].set_int64_param(
      512);
  ExpectRefused(request, "without --shared_memory_prefix", grpc::StatusCode::UNIMPLEMENTED);
}

// Triton's examples begin with these calls, whatever memory they use then.
TEST_F(OipTest, CudaSharedMemoryHasNoRegions) {
  inference::CudaSharedMemoryStatusRequest request;
  inference::CudaSharedMemoryStatusResponse status;
  EXPECT_TRUE(Call(&Stub::CudaSharedMemoryStatus, request, &status).ok());
  EXPECT_TRUE(status.regions().empty());
  request.set_name("r");
  EXPECT_EQ(Call(&Stub::CudaSharedMemoryStatus, request, &status).error_code(),
            grpc::StatusCode::NOT_FOUND);
  inference::CudaSharedMemoryUnregisterResponse unregistered;
  EXPECT_TRUE(Call(&Stub::CudaSharedMemoryUnregister,
                   inference::CudaSharedMemoryUnregisterRequest(), &unregistered)
                  .ok());
  inference::CudaSharedMemoryRegisterResponse registered;
  const grpc::Status refused = Call(&Stub::CudaSharedMemoryRegister,
                                    inference::CudaSharedMemoryRegisterRequest(), &registered);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("use system shared memory"));
}

}  // namespace
}  // namespace awqd::services
