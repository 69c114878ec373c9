// A server that is stopped during clients' calls, some of which read slowly.
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "tests/e2e/server_test.h"

namespace awqd {
namespace {

constexpr int64_t kBigK = 4096, kBigN = 8192;  // 128 MiB as fp32

class DrainTest : public ServerTest {
 protected:
  void StartWith(const std::string& model) {
    Start({"--load_model=" + model, "--stream_chunk_bytes=1MiB"});
  }
};

// DequantizeStream of the big weight over a connection of its own, read at the test's pace.
class SlowReader {
 public:
  explicit SlowReader(const ServerProcess& server) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    stub_ = v1::QuantizedInference::NewStub(server.NewChannel(arguments));
    v1::DequantizeRequest request;
    request.mutable_weight()->set_model("big");
    request.mutable_weight()->set_weight("layer");
    request.set_output_dtype(v1::FP32);
    context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    reader_ = stub_->DequantizeStream(&context_, request);
  }

  // Rows of the next chunk; 0 after the last.
  int64_t Read() {
    v1::DequantizeChunk chunk;
    return reader_->Read(&chunk) ? chunk.output().shape(0) : 0;
  }
  // Reads the rest; returns its rows and the final status.
  int64_t ReadAll() {
    int64_t rows = 0;
    while (const int64_t more = Read()) rows += more;
    return rows;
  }
  grpc::Status Finish() { return reader_->Finish(); }

 private:
  std::unique_ptr<v1::QuantizedInference::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::DequantizeChunk>> reader_;
};

TEST_F(DrainTest, SlowReadersCostAChunkEach) {
  SyntheticAwq::Random(kBigK, kBigN, 128, 1).Write(repository_ / "big");
  StartWith("big");
  ASSERT_TRUE(server_->NewClient()
                  ->Dequantize({.weight = client::WeightName{"big", "layer"}, .row_end = 64})
                  .ok());
  const int64_t before = server_->rss_bytes();
  std::vector<std::unique_ptr<SlowReader>> readers;
  for (int i = 0; i < 4; ++i) {
    readers.push_back(std::make_unique<SlowReader>(*server_));
    EXPECT_GT(readers.back()->Read(), 0);
  }
  int64_t most = 0;
  for (int i = 0; i < 50; ++i) {
    most = std::max(most, server_->rss_bytes() - before);
    absl::SleepFor(absl::Milliseconds(20));
  }
  EXPECT_LT(most, int64_t{64} << 20) << "512 MiB of answers wait to be read";
  EXPECT_TRUE(server_->NewClient()
                  ->Dequantize({.weight = client::WeightName{"big", "layer"}, .row_end = 64})
                  .ok());
  readers.resize(1);  // the others disappear without notice
  EXPECT_GT(readers[0]->ReadAll(), kBigK / 2);
  EXPECT_TRUE(readers[0]->Finish().ok());
  Stop();
}

TEST_F(DrainTest, RefusesNewCallsAndFinishesTheOldOnes) {
  SyntheticAwq::Random(kBigK, kBigN, 128, 1).Write(repository_ / "big");
  StartWith("big");
  SlowReader reader(*server_);
  const int64_t first = reader.Read();
  ASSERT_GT(first, 0);
  const auto old_client = server_->NewClient();
  const auto new_client = server_->NewClient();  // connects when it is first used
  ASSERT_TRUE(old_client->GetServerInfo().ok());
  server_->Signal(SIGTERM);
  const auto last_answer = [](client::Client& client) {
    absl::Status status;
    for (int i = 0; i < 2000 && status.ok(); ++i) {
      absl::SleepFor(absl::Milliseconds(5));
      status = client.GetServerInfo().status();
    }
    return status;
  };
  for (client::Client* client : {old_client.get(), new_client.get()}) {
    const absl::Status status = last_answer(*client);
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  }
  EXPECT_EQ(reader.ReadAll(), kBigK - first) << "an accepted call is served to its end";
  EXPECT_TRUE(reader.Finish().ok());
  ExpectGoodEnd();
}

// Written by hand, because a gRPC client sends a message as fast as it can.
TEST_F(DrainTest, AnUploadInProgressIsFinishedAndAnswered) {
  SyntheticAwq::Random(256, 64, 64, 1).Write(repository_ / "m");
  StartWith("m");
  const std::string bytes = ProductOfZeros(16, 256).SerializeAsString();
  const std::string message = Message(static_cast<uint32_t>(bytes.size()), bytes);
  Socket upload(port_);
  upload.Send(Hello() + Frame(kHeaders, kEndHeaders, 1, CallHeaders()) +
              Frame(kData, 0, 1, message.substr(0, 1000)));
  ASSERT_TRUE(server_->NewClient()->GetServerInfo().ok());
  bool closed = false;
  std::string frames = upload.Receive(200, &closed);  // the server has received the headers by then
  const absl::Time signalled = absl::Now();
  server_->Signal(SIGTERM);
  frames += upload.Receive(1000, &closed);
  EXPECT_FALSE(closed) << "after " << absl::Now() - signalled;
  upload.Send(Frame(kData, kEndStream, 1, message.substr(1000)));
  frames += upload.Receive(1000, &closed);
  EXPECT_GT(PayloadsOf(kData, frames).size(), 16u * 64u * 2u);
  ExpectGoodEnd();
}

// A caller that sends its next product as soon as it has an answer, until one fails.
struct Caller {
  std::unique_ptr<client::Client> client;
  std::thread thread;
  std::atomic<int> good = 0, wrong = 0;
  absl::Status last;

  void Run(const client::MatmulCall& call, const std::string& expected) {
    thread = std::thread([this, call, expected] {
      for (;;) {
        const auto y = client->QuantizedMatmul(call);
        last = y.status();
        if (!y.ok()) return;
        (y->output.bytes == expected ? good : wrong) += 1;
      }
    });
  }
};

TEST_F(DrainTest, BusyClientsSeeAnswersAndThenUnavailable) {
  SyntheticAwq::Random(256, 64, 64, 1).Write(repository_ / "m");
  const client::MatmulCall call = OneToken();
  for (int round = 0; round < 10; ++round) {
    StartWith("m");
    const std::string expected = server_->NewClient()->QuantizedMatmul(call)->output.bytes;
    std::vector<Caller> callers(8);
    for (Caller& caller : callers) {
      caller.client = server_->NewClient();
      caller.Run(call, expected);
    }
    const absl::Time limit = absl::Now() + absl::Seconds(30);
    for (const Caller& caller : callers) {
      while (caller.good == 0 && absl::Now() < limit) absl::SleepFor(absl::Milliseconds(1));
    }
    absl::SleepFor(absl::Milliseconds(7 * round));  // a different moment of their calls each time
    EXPECT_LT(Stop().took, absl::Seconds(5));
    for (Caller& caller : callers) {
      caller.thread.join();
      EXPECT_TRUE(absl::IsUnavailable(caller.last)) << caller.last;
      EXPECT_EQ(caller.wrong, 0);
      EXPECT_GT(caller.good, 0);
    }
  }
}

TEST_F(DrainTest, IdleClientsDoNotHoldTheEndBack) {
  SyntheticAwq::Random(256, 64, 64, 1).Write(repository_ / "m");
  StartWith("m");
  std::vector<std::unique_ptr<client::Client>> clients;
  for (int i = 0; i < 8; ++i) {
    clients.push_back(server_->NewClient());
    ASSERT_TRUE(clients.back()->GetServerInfo().ok());
  }
  // They are synchronous, so their connections are not read between two calls.
  EXPECT_LT(Stop().took, absl::Seconds(2)) << "gRPC waits up to 20 s for such clients";
  EXPECT_TRUE(absl::IsUnavailable(clients[0]->GetServerInfo().status()));
}

TEST_F(DrainTest, EndsLoadsThatClientsAskedFor) {
  constexpr int kLoads = 6;
  SyntheticAwq::Random(64, 16, 32, 1).Write(repository_ / "m");
  SyntheticAwq::Random(8192, 8192, 128, 2).Write(repository_ / "big0");
  for (int i = 1; i < kLoads; ++i) {
    std::filesystem::copy(repository_ / "big0", repository_ / absl::StrCat("big", i),
                          std::filesystem::copy_options::recursive |
                              std::filesystem::copy_options::create_hard_links);
  }
  StartWith("m");
  std::vector<absl::Status> statuses(kLoads);
  std::vector<std::thread> threads;
  for (int i = 0; i < kLoads; ++i) {
    threads.emplace_back(
        [&, i] { statuses[i] = client_->LoadModel(absl::StrCat("big", i)).status(); });
  }
  bool loading = false;
  for (int i = 0; i < 5000 && !loading; ++i) {
    const auto models = client_->ListModels();
    ASSERT_TRUE(models.ok()) << models.status();
    for (const v1::ModelSummary& model : models->models()) loading |= model.state() == v1::LOADING;
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_TRUE(loading);
  server_->Signal(SIGTERM);
  for (std::thread& thread : threads) thread.join();
  EXPECT_LT(ExpectGoodEnd().took, absl::Seconds(10));
  int ended = 0;
  for (const absl::Status& status : statuses) {
    const bool told = absl::IsUnavailable(status) || absl::IsCancelled(status);
    EXPECT_TRUE(status.ok() || told) << status;
    ended += told ? 1 : 0;
  }
  EXPECT_GT(ended, 0) << "all were loaded before the signal came";
}

}  // namespace
}  // namespace awqd
