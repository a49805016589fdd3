#include "data/dataset.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <set>

#include "core/error.h"
#include "core/temporary_folder.h"

namespace agoq {
namespace {

namespace fs = std::filesystem;

// Pseudo-random bytes, so that no two documents are alike; the length varies, one is a single byte.
std::string document_text(int d) {
  const RandomKey key{.seed = 11, .tensor = static_cast<std::uint32_t>(d)};
  const std::uint32_t length = d == 3 ? 1 : 2 + random_bits(key, 0) % 300;
  std::string text;
  for (std::uint32_t i = 0; i < length; ++i) text += static_cast<char>(random_bits(key, i + 1) % 256);
  return text;
}

constexpr int kDocuments = 25;

DataConfig write_documents(const TemporaryFolder& folder) {
  for (int d = 0; d < kDocuments; ++d) folder.write(fmt::format("{:03}.txt", d), document_text(d));
  DataConfig config;
  config.paths = {folder.path()};
  config.holdout_every = 5;
  config.holdout_index = 2;
  return config;
}

std::vector<std::int32_t> tokens_of(const std::string& text) {
  std::vector<std::int32_t> tokens{kDocumentBorder};
  for (const char byte : text) tokens.push_back(static_cast<unsigned char>(byte));
  return tokens;
}

// `count` sequences from `first` on, one after another.
HostBatch filled(const Dataset& dataset, Split split, std::int64_t first, std::int64_t count,
                 std::int64_t sequence, std::uint64_t seed = 1) {
  HostBatch batch;
  dataset.fill(split, seed, first, count, sequence, batch);
  return batch;
}

bool same(const HostBatch& a, const HostBatch& b) {
  return a.tokens == b.tokens && a.targets == b.targets && a.weights == b.weights &&
         a.positions == b.positions && a.document_starts == b.document_starts &&
         a.document_count == b.document_count && a.longest_document == b.longest_document &&
         a.valid_tokens == b.valid_tokens;
}

std::string error_of(const DataConfig& config) {
  try {
    Dataset::load(config);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput);
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
    return error.what();
  }
  return "";
}

class AnySequence : public testing::TestWithParam<std::int64_t> {};
INSTANTIATE_TEST_SUITE_P(Dataset, AnySequence, testing::Values(1, 7, 256, 1000, 1025));

TEST_P(AnySequence, TrainingWalksEveryDocumentOncePerEpochApartFromTheRest) {
  const TemporaryFolder folder;
  const Dataset dataset = Dataset::load(write_documents(folder));
  const std::int64_t sequence = GetParam();
  const std::int64_t count = dataset.sequences(Split::kTraining, sequence);
  ASSERT_EQ(count, dataset.tokens(Split::kTraining) / sequence);

  std::multiset<std::vector<std::int32_t>> expected;
  for (int d = 0; d < kDocuments; ++d) {
    if (d % 5 != 2) expected.insert(tokens_of(document_text(d)));
  }
  std::vector<std::vector<std::int32_t>> epochs;
  for (const std::int64_t epoch : {0, 1}) {
    // Put back into the order of the stream: every place is met exactly once.
    std::vector<std::int32_t> stream(static_cast<std::size_t>(count * sequence));
    std::set<std::int64_t> places;
    for (std::int64_t i = 0; i < count; ++i) {
      const HostBatch batch = filled(dataset, Split::kTraining, epoch * count + i, 1, sequence);
      const std::int64_t place = Dataset::spread(epoch * count + i, count);
      places.insert(place);
      std::copy(batch.tokens.begin(), batch.tokens.end(), stream.begin() + place * sequence);
    }
    EXPECT_EQ(static_cast<std::int64_t>(places.size()), count);
    EXPECT_EQ(*places.rbegin(), count - 1);
    std::multiset<std::vector<std::int32_t>> left = expected;
    std::vector<std::int32_t> document;
    const auto check_off = [&] {
      const auto found = left.find(document);
      ASSERT_NE(found, left.end()) << "a document that is none, or for the second time";
      left.erase(found);
      document.clear();
    };
    for (const std::int32_t token : stream) {
      if (token == kDocumentBorder && !document.empty()) check_off();
      document.push_back(token);
    }
    if (left.count(document) > 0) check_off();  // else the epoch ends within the last document
    std::size_t missing = 0;
    for (const auto& tokens : left) missing += tokens.size();
    EXPECT_EQ(missing - document.size(),
              static_cast<std::size_t>(dataset.tokens(Split::kTraining) - count * sequence));
    EXPECT_LT(missing - document.size(), static_cast<std::size_t>(sequence));
    epochs.push_back(stream);
  }
  EXPECT_NE(epochs[0], epochs[1]) << "the epochs have the same order";
}

TEST_P(AnySequence, ValidationCoversEveryTokenOnceInPathOrder) {
  const TemporaryFolder folder;
  const Dataset dataset = Dataset::load(write_documents(folder));
  const std::int64_t sequence = GetParam();
  std::vector<std::int32_t> expected;
  for (int d = 2; d < kDocuments; d += 5) {
    const auto tokens = tokens_of(document_text(d));
    expected.insert(expected.end(), tokens.begin(), tokens.end());
  }
  const std::int64_t count = dataset.sequences(Split::kValidation, sequence);
  const HostBatch batch = filled(dataset, Split::kValidation, 0, count + 2, sequence);
  ASSERT_GE(batch.tokens.size(), expected.size());
  EXPECT_LT(count * sequence - static_cast<std::int64_t>(expected.size()), sequence);
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), batch.tokens.begin()));
  for (std::size_t i = expected.size(); i < batch.tokens.size(); ++i) {
    EXPECT_EQ(batch.weights[i], 0.0f);
    EXPECT_EQ(batch.tokens[i], kDocumentBorder);
  }
  // Every byte of a document and its end are predicted once.
  EXPECT_EQ(batch.valid_tokens, static_cast<std::int64_t>(expected.size()));
  EXPECT_EQ(std::accumulate(batch.weights.begin(), batch.weights.end(), 0.0),
            static_cast<double>(expected.size()));
}

TEST_P(AnySequence, ReachesAnySequenceWithoutTheOnesBefore) {
  const TemporaryFolder folder;
  const DataConfig config = write_documents(folder);
  const Dataset dataset = Dataset::load(config);
  const std::int64_t sequence = GetParam();
  const std::int64_t per_epoch = dataset.sequences(Split::kTraining, sequence);
  // Over an epoch's end, in one batch and one by one on another instance, backwards.
  const std::int64_t first = 3 * per_epoch - 2;
  const HostBatch together = filled(dataset, Split::kTraining, first, 4, sequence);
  const Dataset fresh = Dataset::load(config);
  for (std::int64_t i = 3; i >= 0; --i) {
    const HostBatch one = filled(fresh, Split::kTraining, first + i, 1, sequence);
    EXPECT_TRUE(
        std::equal(one.tokens.begin(), one.tokens.end(), together.tokens.begin() + i * sequence));
    EXPECT_TRUE(
        std::equal(one.targets.begin(), one.targets.end(), together.targets.begin() + i * sequence));
    EXPECT_TRUE(std::equal(one.positions.begin(), one.positions.end(),
                           together.positions.begin() + i * sequence));
  }
}

TEST_P(AnySequence, TargetsAreTheFollowingTokensAndDocumentsRestartPositions) {
  const TemporaryFolder folder;
  for (const bool document_attention : {true, false}) {
    DataConfig config = write_documents(folder);
    config.document_attention = document_attention;
    const Dataset dataset = Dataset::load(config);
    const std::int64_t sequence = GetParam();
    const std::int64_t count =
        std::min<std::int64_t>(dataset.sequences(Split::kTraining, sequence), 300);
    const HostBatch batch = filled(dataset, Split::kTraining, 0, count, sequence);
    std::int64_t d = 0;
    std::int64_t longest = 0;
    for (std::int64_t i = 0; i < count * sequence; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const bool at_border = batch.tokens[at] == kDocumentBorder;
      const bool starts = i % sequence == 0 || (document_attention && at_border);
      if (starts) {
        ASSERT_EQ(batch.document_starts[static_cast<std::size_t>(d)], i);
        ++d;
      }
      const std::int64_t start = batch.document_starts[static_cast<std::size_t>(d - 1)];
      ASSERT_EQ(batch.positions[at], i - start);
      longest = std::max(longest, i - start + 1);
      if ((i + 1) % sequence != 0) {
        ASSERT_EQ(batch.targets[at], batch.tokens[at + 1]);
      }
      ASSERT_EQ(batch.weights[at], 1.0f) << i;
    }
    EXPECT_EQ(batch.document_count, d);
    EXPECT_EQ(batch.document_starts[static_cast<std::size_t>(d)], count * sequence);
    EXPECT_EQ(batch.longest_document, longest);
  }
}

TEST(Dataset, GivesTheSameBatchesForTheSameSeedOnly) {
  const TemporaryFolder folder;
  const DataConfig config = write_documents(folder);
  const Dataset first = Dataset::load(config);
  const Dataset second = Dataset::load(config);
  EXPECT_TRUE(
      same(filled(first, Split::kTraining, 5, 4, 33), filled(second, Split::kTraining, 5, 4, 33)));
  EXPECT_FALSE(
      same(filled(first, Split::kTraining, 5, 4, 33, 1), filled(first, Split::kTraining, 5, 4, 33, 2)));
  EXPECT_TRUE(same(filled(first, Split::kValidation, 0, 4, 33, 1),
                   filled(first, Split::kValidation, 0, 4, 33, 2)));
}

TEST(Dataset, FillsABatchThatHasItsSizeInPlace) {
  const TemporaryFolder folder;
  const Dataset dataset = Dataset::load(write_documents(folder));
  HostBatch batch;
  dataset.fill(Split::kTraining, 1, 0, 2, 64, batch);
  const auto* tokens = batch.tokens.data();
  const auto* starts = batch.document_starts.data();
  for (std::int64_t i = 1; i < 100; ++i) dataset.fill(Split::kTraining, 1, 2 * i, 2, 64, batch);
  dataset.fill(Split::kValidation, 1, 0, 2, 64, batch);
  EXPECT_EQ(batch.tokens.data(), tokens);
  EXPECT_EQ(batch.document_starts.data(), starts);
}

TEST(Dataset, ReadsUtf8AsBytes) {
  const TemporaryFolder folder;
  folder.write("a.txt", "\xC3\xA9\xE2\x82\xAC");
  folder.write("b.txt", "\xFF");
  DataConfig config;
  config.paths = {folder.path()};
  config.holdout_every = 2;
  config.holdout_index = 0;
  const HostBatch batch = filled(Dataset::load(config), Split::kValidation, 0, 1, 6);
  EXPECT_EQ(batch.tokens, (std::vector<std::int32_t>{kDocumentBorder, 0xC3, 0xA9, 0xE2, 0x82, 0xAC}));
  EXPECT_EQ(batch.targets, (std::vector<std::int32_t>{0xC3, 0xA9, 0xE2, 0x82, 0xAC, kDocumentBorder}));
}

TEST(Dataset, Order1LossOfAHandCountedCase) {
  const TemporaryFolder folder;
  folder.write("a.txt", "aab");  // training: $a, aa, ab, b$
  folder.write("b.txt", "ab");   // validation: $a, ab, b$
  folder.write("c.txt", "ba");   // training: $b, ba, a$
  DataConfig config;
  config.paths = {folder.path()};
  config.holdout_every = 3;
  config.holdout_index = 1;
  // After the border (seen twice): 'a' once. After 'a' (3 times): 'b' once. After 'b' (twice): the
  // border once.
  const double expected = (std::log(259.0 / 2.0) + std::log(260.0 / 2.0) + std::log(259.0 / 2.0)) / 3;
  EXPECT_NEAR(Dataset::load(config).order1_loss(), expected, 1e-12);
}

TEST(Dataset, EvaluationTakesEveryDocument) {
  const TemporaryFolder folder;
  folder.write("a.txt", "one");
  DataConfig config;
  config.paths = {folder.path()};
  const Dataset dataset = Dataset::load(config, DataUse::kEvaluation);
  EXPECT_EQ(dataset.documents(Split::kValidation), 1);
  EXPECT_EQ(dataset.tokens(Split::kValidation), 4);
}

TEST(Dataset, ReadsFoldersByExtensionAndNamedFilesAlways) {
  const TemporaryFolder folder;
  folder.write("deep/er/a.md", "a");
  folder.write("b.txt", "bb");
  folder.write("c.bin", "ccc");
  folder.write("d.data", "dddd");
  folder.write("empty.txt", "");
  DataConfig config;
  config.paths = {folder.path(), folder.path("d.data"), folder.path("b.txt")};
  config.holdout_every = 3;
  config.holdout_index = 0;
  const Dataset dataset = Dataset::load(config);
  EXPECT_EQ(dataset.documents(Split::kTraining) + dataset.documents(Split::kValidation), 3);
  EXPECT_EQ(dataset.tokens(Split::kValidation), 1 + 2);  // b.txt comes first
  EXPECT_EQ(dataset.tokens(Split::kTraining), 5 + 2);
  EXPECT_GE(dataset.bytes(), 7u);
}

TEST(Dataset, RefusesWhatCannotBeTrainedOnInOneLine) {
  const TemporaryFolder folder;
  DataConfig config;
  EXPECT_NE(error_of(config).find("data.paths is empty"), std::string::npos);
  config.paths = {folder.path("nowhere")};
  EXPECT_NE(error_of(config).find("nowhere does not exist"), std::string::npos);
  config.paths = {folder.path()};
  EXPECT_NE(error_of(config).find("holds no file that ends in .txt, .md, .pod"), std::string::npos);
  folder.write("a.txt", "text");
  EXPECT_NE(error_of(config).find("no document is left for validation"), std::string::npos);
  config.holdout_every = 2;
  config.holdout_index = 0;
  EXPECT_NE(error_of(config).find("no document is left for training"), std::string::npos);
  folder.write("b.txt", "text");
  const Dataset dataset = Dataset::load(config);
  EXPECT_EQ(dataset.sequences(Split::kTraining, 6), 0);
  HostBatch batch;
  EXPECT_THROW(dataset.fill(Split::kTraining, 1, 0, 1, 6, batch), Error);
  if (geteuid() != 0) {  // root reads everything
    chmod(folder.path("b.txt").c_str(), 0);
    EXPECT_NE(error_of(config).find("b.txt cannot be read"), std::string::npos);
  }
  fs::create_directory(folder.path("c.txt"));
  fs::remove(folder.path("b.txt"));
  fs::create_symlink(folder.path("gone"), folder.path("link"));
  config.paths = {folder.path("a.txt"), folder.path("link")};
  EXPECT_NE(error_of(config).find("link does not exist"), std::string::npos);
}

}  // namespace
}  // namespace agoq
