#include "data/dataset.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <numeric>
#include <utility>

#include "core/checksum.h"
#include "core/error.h"

namespace agoq {
namespace {

namespace fs = std::filesystem;

bool has_extension(const std::string& path, const std::vector<std::string>& extensions) {
  return std::any_of(extensions.begin(), extensions.end(),
                     [&path](const std::string& extension) { return path.ends_with(extension); });
}

std::string join(const std::vector<std::string>& texts) {
  std::string joined;
  for (const std::string& text : texts) joined += (joined.empty() ? "" : ", ") + text;
  return joined;
}

void add_folder(const std::string& folder, const DataConfig& config, std::vector<std::string>& files) {
  const std::size_t before = files.size();
  std::error_code error;
  for (fs::recursive_directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    std::error_code ignored;  // a file that vanished is not there
    const std::string path = entry->path().generic_string();
    if (has_extension(path, config.extensions) && entry->is_regular_file(ignored)) files.push_back(path);
  }
  check_input(!error, "data.paths: the folder {} cannot be read: {}", folder, error.message());
  check_input(files.size() > before, "data.paths: the folder {} holds no file that ends in {}", folder,
              join(config.extensions));
}

// Every file once, in order of its path: the document numbers that the split is made by.
std::vector<std::string> find_files(const DataConfig& config) {
  check_input(!config.paths.empty(), "data.paths is empty: name text files or folders");
  std::vector<std::string> files;
  for (const std::string& path : config.paths) {
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    check_input(fs::exists(status),
                "data.paths: {} does not exist (paths start at the working directory)", path);
    if (fs::is_directory(status)) {
      add_folder(path, config, files);
    } else {
      files.push_back(path);
    }
  }
  std::sort(files.begin(), files.end());
  files.erase(std::unique(files.begin(), files.end()), files.end());
  return files;
}

// Appends the file's bytes to `text`; returns how many.
std::int64_t append_file(const std::string& path, std::vector<char>& text) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::error_code error;
  const std::uintmax_t size = fs::file_size(path, error);
  check_input(file.good() && !error, "data.paths: {} cannot be read: {}", path,
              error ? error.message() : std::strerror(errno));
  const std::size_t begin = text.size();
  text.resize(begin + size);
  file.read(text.data() + begin, static_cast<std::streamsize>(size));
  check_input(!file.bad() && file.gcount() == static_cast<std::streamsize>(size),
              "data.paths: {} has {} bytes, but only {} could be read", path, size, file.gcount());
  return static_cast<std::int64_t>(size);
}

std::int32_t token_of(char byte) { return static_cast<unsigned char>(byte); }

}  // namespace

Dataset Dataset::load(const DataConfig& config, DataUse use) {
  check_input(
      config.holdout_every >= 2 && config.holdout_index >= 0 &&
          config.holdout_index < config.holdout_every,
      "data.holdout_index is {} and data.holdout_every {}: expected 0 <= index < every, every >= 2",
      config.holdout_index, config.holdout_every);
  const std::vector<std::string> files = find_files(config);
  Dataset dataset;
  dataset.document_attention_ = config.document_attention;
  std::uintmax_t total = 0;
  for (const std::string& file : files) {
    std::error_code error;
    const std::uintmax_t size = fs::file_size(file, error);
    if (!error) total += size;
  }
  dataset.text_.reserve(total);

  std::int64_t number = 0;
  for (const std::string& file : files) {
    const auto begin = static_cast<std::int64_t>(dataset.text_.size());
    const std::int64_t length = append_file(file, dataset.text_);
    if (length == 0) continue;
    const bool held_out =
        use == DataUse::kEvaluation || number % config.holdout_every == config.holdout_index;
    ++number;
    (held_out ? dataset.validation_ : dataset.training_).push_back({begin, length});
  }
  check_input(number > 0, "data.paths: {} {} empty: name files that hold text", join(config.paths),
              config.paths.size() == 1 ? "is" : "are");
  for (const Split split : {Split::kTraining, Split::kValidation}) {
    if (use == DataUse::kEvaluation && split == Split::kTraining) continue;
    check_input(
        !dataset.documents_of(split).empty(),
        "data: no document is left for {}: of {} documents, number d is held out when d % {} == {}; "
        "add documents or change data.holdout_every and data.holdout_index",
        split == Split::kTraining ? "training" : "validation", number, config.holdout_every,
        config.holdout_index);
  }
  check_input(number <= std::numeric_limits<std::int32_t>::max(),
              "data: {} documents are more than 2^31", number);

  Order& order = dataset.validation_order_;
  order.documents.resize(dataset.validation_.size());
  std::iota(order.documents.begin(), order.documents.end(), 0);
  set_starts(dataset.validation_, order);

  dataset.epoch_ = std::make_unique<Epoch>();
  dataset.epoch_->order.documents.resize(dataset.training_.size());
  std::iota(dataset.epoch_->order.documents.begin(), dataset.epoch_->order.documents.end(), 0);
  set_starts(dataset.training_, dataset.epoch_->order);
  return dataset;
}

void Dataset::set_starts(const std::vector<Document>& documents, Order& order) {
  order.starts.resize(documents.size() + 1);
  std::int64_t position = 0;
  for (std::size_t i = 0; i < order.documents.size(); ++i) {
    order.starts[i] = position;
    position += documents[static_cast<std::size_t>(order.documents[i])].length + 1;
  }
  order.starts.back() = position;
}

std::string Dataset::fingerprint() const {
  std::uint32_t value = checksum(text_.data(), text_.size());
  for (const std::vector<Document>* documents : {&training_, &validation_}) {
    for (const Document& document : *documents) {
      value = checksum(&document.length, sizeof document.length, value);
    }
  }
  return fmt::format("{} documents of {} bytes with the CRC-32 {:08x}",
                     training_.size() + validation_.size(), text_.size(), value);
}

std::int64_t Dataset::documents(Split split) const {
  return static_cast<std::int64_t>(documents_of(split).size());
}

std::int64_t Dataset::tokens(Split split) const {
  // A pass is as long in every order.
  return split == Split::kTraining ? epoch_->order.starts.back() : validation_order_.starts.back();
}

std::size_t Dataset::bytes() const {
  const std::size_t count = training_.size() + validation_.size();
  return text_.capacity() + count * (sizeof(Document) + sizeof(std::int32_t) + sizeof(std::int64_t));
}

std::int64_t Dataset::sequences(Split split, std::int64_t sequence) const {
  check(sequence > 0, "a sequence of {} tokens was asked for", sequence);
  const std::int64_t rest = split == Split::kValidation ? sequence - 1 : 0;
  return (tokens(split) + rest) / sequence;
}

std::int64_t Dataset::spread(std::int64_t number, std::int64_t per_epoch) {
  __extension__ using Wide = unsigned __int128;  // the product of two 64-bit numbers
  // A stride near the golden section of the pass, without a common divisor: every place is met once,
  // and the places of any few consecutive numbers are far apart.
  auto stride = static_cast<std::int64_t>(0.6180339887 * static_cast<double>(per_epoch));
  stride = std::max<std::int64_t>(1, stride);
  while (std::gcd(stride, per_epoch) != 1) ++stride;
  return static_cast<std::int64_t>(static_cast<Wide>(number % per_epoch) * static_cast<Wide>(stride) %
                                   static_cast<Wide>(per_epoch));
}

void Dataset::shuffle(std::uint64_t seed, std::int64_t number) const {
  Epoch& epoch = *epoch_;
  if (epoch.shuffled && epoch.seed == seed && epoch.number == number) return;
  RandomKey key;
  key.seed = seed;
  key.step = static_cast<std::uint32_t>(number);
  key.purpose = RandomPurpose::kDataOrder;
  // Fisher and Yates, from path order every time, so that an epoch does not depend on the ones before.
  std::vector<std::int32_t>& documents = epoch.order.documents;
  std::iota(documents.begin(), documents.end(), 0);
  for (std::size_t i = documents.size() - 1; i > 0; --i) {
    const std::uint64_t other = random_bits(key, i) * static_cast<std::uint64_t>(i + 1) >> 32;
    std::swap(documents[i], documents[other]);
  }
  set_starts(training_, epoch.order);
  epoch.shuffled = true;
  epoch.seed = seed;
  epoch.number = number;
}

void Dataset::fill(Split split, std::uint64_t seed, std::int64_t first, std::int64_t count,
                   std::int64_t sequence, HostBatch& batch) const {
  check(first >= 0 && count > 0 && sequence > 0,
        "{} sequences of {} tokens from number {} were asked for", count, sequence, first);
  const auto total = static_cast<std::size_t>(count * sequence);
  batch.tokens.resize(total);
  batch.targets.resize(total);
  batch.weights.resize(total);
  batch.positions.resize(total);
  batch.document_starts.resize(total + 1);
  batch.document_count = 0;
  batch.longest_document = 0;
  batch.valid_tokens = 0;
  if (split == Split::kValidation) {
    for (std::int64_t i = 0; i < count; ++i) {
      fill_sequence(validation_, validation_order_, (first + i) * sequence, sequence, i * sequence,
                    batch);
    }
  } else {
    const std::int64_t per_epoch = sequences(split, sequence);
    check_input(
        per_epoch > 0,
        "train.sequence is {} tokens, but the training documents have only {}: choose a shorter one",
        sequence, tokens(split));
    const std::lock_guard<std::mutex> lock(epoch_->mutex);
    for (std::int64_t i = 0; i < count; ++i) {
      shuffle(seed, (first + i) / per_epoch);
      const std::int64_t place = spread(first + i, per_epoch);
      fill_sequence(training_, epoch_->order, place * sequence, sequence, i * sequence, batch);
    }
  }
  const auto documents = static_cast<std::size_t>(batch.document_count);
  batch.document_starts[documents] = static_cast<std::int32_t>(total);
  for (std::size_t d = 0; d < documents; ++d) {
    const std::int64_t length = batch.document_starts[d + 1] - batch.document_starts[d];
    batch.longest_document = std::max(batch.longest_document, length);
  }
}

// Writes the `sequence` tokens from stream position `position` to the batch from index `at` on.
void Dataset::fill_sequence(const std::vector<Document>& documents, const Order& order,
                            std::int64_t position, std::int64_t sequence, std::int64_t at,
                            HostBatch& batch) const {
  const auto start_document = [&batch](std::int64_t index) {
    batch.document_starts[static_cast<std::size_t>(batch.document_count++)] =
        static_cast<std::int32_t>(index);
  };
  const std::int64_t pass = order.starts.back();
  const std::int64_t end = at + sequence;
  std::int64_t place = 0;  // the next token's position
  auto ordinal = static_cast<std::size_t>(
      std::upper_bound(order.starts.begin(), order.starts.end(), position) - order.starts.begin());
  ordinal = ordinal == 0 ? 0 : ordinal - 1;
  start_document(at);
  while (at < end && position < pass) {
    const Document& document = documents[static_cast<std::size_t>(order.documents[ordinal])];
    const char* text = text_.data() + document.begin;
    for (std::int64_t offset = position - order.starts[ordinal]; offset <= document.length && at < end;
         ++offset, ++position, ++place, ++at) {
      const auto i = static_cast<std::size_t>(at);
      batch.tokens[i] = offset == 0 ? kDocumentBorder : token_of(text[offset - 1]);
      batch.targets[i] = offset < document.length ? token_of(text[offset]) : kDocumentBorder;
      batch.weights[i] = 1.0f;
      ++batch.valid_tokens;
      batch.positions[i] = static_cast<std::int32_t>(place);
    }
    if (position == order.starts[ordinal + 1]) {
      ++ordinal;
      if (document_attention_ && at < end) {
        start_document(at);
        place = 0;
      }
    }
  }
  // Past the end of the validation pass.
  for (; at < end; ++at, ++place) {
    const auto i = static_cast<std::size_t>(at);
    batch.tokens[i] = kDocumentBorder;
    batch.targets[i] = kDocumentBorder;
    batch.weights[i] = 0.0f;
    batch.positions[i] = static_cast<std::int32_t>(place);
  }
}

double Dataset::order1_loss() const {
  // Calls visit(token, target) for every target, in path order.
  const auto walk = [this](const std::vector<Document>& documents, const auto& visit) {
    for (const Document& document : documents) {
      std::int32_t token = kDocumentBorder;
      for (std::int64_t i = 0; i < document.length; ++i) {
        const std::int32_t target = token_of(text_[static_cast<std::size_t>(document.begin + i)]);
        visit(token, target);
        token = target;
      }
      visit(token, kDocumentBorder);
    }
  };
  std::vector<std::int64_t> pairs(kByteVocabulary * kByteVocabulary, 0);
  std::vector<std::int64_t> singles(kByteVocabulary, 0);
  walk(training_, [&](std::int32_t token, std::int32_t target) {
    ++pairs[static_cast<std::size_t>(token * kByteVocabulary + target)];
    ++singles[static_cast<std::size_t>(token)];
  });
  double loss = 0;
  std::int64_t count = 0;
  walk(validation_, [&](std::int32_t token, std::int32_t target) {
    const auto pair = pairs[static_cast<std::size_t>(token * kByteVocabulary + target)];
    const auto single = singles[static_cast<std::size_t>(token)];
    loss += std::log(static_cast<double>(single + kByteVocabulary) / static_cast<double>(pair + 1));
    ++count;
  });
  return loss / static_cast<double>(count);
}

}  // namespace agoq
