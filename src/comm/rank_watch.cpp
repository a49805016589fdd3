// Frames on a connection: kind (1 byte), status (1), length of the text (2, little-endian), the text.
#include "comm/rank_watch.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "comm/launch.h"
#include "comm/rank_names.h"
#include "comm/together.h"

namespace agoq {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

double seconds_since(Clock::time_point start) { return Seconds(Clock::now() - start).count(); }

/// A file descriptor of its own.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  int number() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }

 private:
  int number_ = -1;
};

// --- frames ---

enum class FrameKind : std::uint8_t {
  kHello = 1,  // when connecting to rank 0 or the deputy: token and rank
  kWelcome,    // the answer: the token
  kAlive,      // how many exchanges the sender has come to, and what it is doing
  kGoodbye,    // the sender ends regularly; rank 0 answers with the same
  kFailed,     // to rank 0: the sender ends with `status` because of the text
  kLate,       // to rank 0: ranks did not come; text_of(Lateness)
  kEnd,        // from rank 0, or the deputy where that is lost: exit with `status`
};

struct Frame {
  FrameKind kind;
  int status = 0;
  std::string text;
};

constexpr std::size_t kHeaderBytes = 4;
constexpr std::size_t kLongestText = 4000;

/// One end of a connection, with what has been received in part and what could not be sent yet.
class Connection {
 public:
  Connection() = default;
  explicit Connection(Descriptor socket) : socket_(std::move(socket)) {
    ::fcntl(socket_.number(), F_SETFL, ::fcntl(socket_.number(), F_GETFL) | O_NONBLOCK);
    const int on = 1;
    ::setsockopt(socket_.number(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }

  int number() const { return socket_.number(); }
  bool is_open() const { return static_cast<bool>(socket_); }
  void close() { socket_ = Descriptor(); }
  bool has_unsent() const { return !unsent_.empty(); }

  void send(const Frame& frame) {
    const std::string text = frame.text.substr(0, kLongestText);
    unsent_ += static_cast<char>(frame.kind);
    unsent_ += static_cast<char>(frame.status);
    unsent_ += static_cast<char>(text.size() & 0xFF);
    unsent_ += static_cast<char>(text.size() >> 8);
    unsent_ += text;
    flush();
  }
  /// Sends what the kernel takes. A broken connection shows when it is read from.
  void flush() {
    while (!unsent_.empty()) {
      const ssize_t count = ::send(number(), unsent_.data(), unsent_.size(), MSG_NOSIGNAL);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return;
      unsent_.erase(0, static_cast<std::size_t>(count));
    }
  }
  /// Calls take(frame) for what has come; false when the connection has closed.
  template <typename Take>
  bool receive(Take take) {
    bool open = true;
    for (;;) {
      char piece[4096];
      const ssize_t count = ::recv(number(), piece, sizeof piece, 0);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
      open = count > 0;
      if (!open) break;
      received_.append(piece, static_cast<std::size_t>(count));
    }
    while (received_.size() >= kHeaderBytes) {
      const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(received_[i]); };
      const std::size_t length = byte(2) + std::size_t{256} * byte(3);
      if (received_.size() < kHeaderBytes + length) break;
      const Frame frame{static_cast<FrameKind>(byte(0)), byte(1),
                        received_.substr(kHeaderBytes, length)};
      received_.erase(0, kHeaderBytes + length);
      take(frame);
    }
    return open;
  }

 private:
  Descriptor socket_;
  std::string received_;
  std::string unsent_;
};

// --- who and where ---

/// What a rank tells the others of itself.
struct Place {
  char host[65] = {};
  char network[160] = {};  // equal for processes that reach each other on 127.0.0.1
  std::int64_t pid = 0;
};

Place place_of_this_process() {
  Place place;
  ::gethostname(place.host, sizeof place.host - 1);
  place.pid = ::getpid();
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::error_code error;
  const std::string name_space = std::filesystem::read_symlink("/proc/self/ns/net", error).string();
  // Where /proc does not say, only a process of the same host name is taken to be near.
  const std::string network = boot + " " + name_space + (error ? place.host : "");
  network.copy(place.network, sizeof place.network - 1);
  return place;
}

struct FreeAddresses {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
  void operator()(ifaddrs* list) const { ::freeifaddrs(list); }
};

/// The numeric addresses under which other machines may reach this one.
std::vector<std::string> addresses_of_this_machine() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return {};
  const std::unique_ptr<ifaddrs, FreeAddresses> list(first);
  std::vector<std::string> addresses;
  for (const ifaddrs* item = first; item != nullptr; item = item->ifa_next) {
    if (item->ifa_addr == nullptr || (item->ifa_flags & IFF_UP) == 0 ||
        (item->ifa_flags & IFF_LOOPBACK) != 0) {
      continue;
    }
    char text[INET6_ADDRSTRLEN] = {};
    if (item->ifa_addr->sa_family == AF_INET) {
      const auto* address = reinterpret_cast<const sockaddr_in*>(item->ifa_addr);
      ::inet_ntop(AF_INET, &address->sin_addr, text, sizeof text);
    } else if (item->ifa_addr->sa_family == AF_INET6) {
      const auto* address = reinterpret_cast<const sockaddr_in6*>(item->ifa_addr);
      // Link-local addresses mean something on their own link only.
      if (!IN6_IS_ADDR_LINKLOCAL(&address->sin6_addr)) {
        ::inet_ntop(AF_INET6, &address->sin6_addr, text, sizeof text);
      }
    }
    if (*text != '\0') addresses.emplace_back(text);
  }
  return addresses;
}

std::string reason() { return std::strerror(errno); }

struct Listener {
  Descriptor socket;
  int port = 0;
};

/// Listens on a port that the kernel picks: on every address of the machine, IPv6 and IPv4, or on
/// 127.0.0.1.
Listener listen_for_ranks(bool everywhere, int ranks) {
  Descriptor socket;
  bool bound = false;
  if (everywhere) {
    socket = Descriptor(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int off = 0;
    sockaddr_in6 address{};
    address.sin6_family = AF_INET6;
    address.sin6_addr = in6addr_any;
    bound = socket && ::setsockopt(socket.number(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) == 0 &&
            ::bind(socket.number(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  }
  if (!bound) {  // not asked for, or a machine without IPv6
    socket = Descriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(everywhere ? INADDR_ANY : INADDR_LOOPBACK);
    bound = socket &&
            ::bind(socket.number(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  }
  const bool listening = bound && ::listen(socket.number(), ranks) == 0;
  check(listening, "no TCP port to watch the ranks on: {}", reason());
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  ::getsockname(socket.number(), reinterpret_cast<sockaddr*>(&address), &length);
  const int port = address.ss_family == AF_INET6
                       ? ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port)
                       : ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
  ::fcntl(socket.number(), F_SETFL, ::fcntl(socket.number(), F_GETFL) | O_NONBLOCK);
  return {std::move(socket), port};
}

bool wait_for(int descriptor, short events, double seconds) {
  pollfd poll{descriptor, events, 0};
  const int milliseconds = static_cast<int>(std::max(seconds, 0.0) * 1e3) + 1;
  return ::poll(&poll, 1, milliseconds) > 0;
}

/// Connects within `seconds`; an empty descriptor and `why` if that fails.
Descriptor connect_to(const std::string& address, const std::string& port, double seconds,
                      std::string& why) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* first = nullptr;
  if (::getaddrinfo(address.c_str(), port.c_str(), &hints, &first) != 0 || first == nullptr) {
    why = "not an address";
    return {};
  }
  const std::unique_ptr<addrinfo, FreeAddresses> list(first);
  Descriptor socket(::socket(first->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket ||
      (::connect(socket.number(), first->ai_addr, first->ai_addrlen) != 0 && errno != EINPROGRESS)) {
    why = reason();
    return {};
  }
  int error = ETIMEDOUT;
  if (wait_for(socket.number(), POLLOUT, seconds)) {
    socklen_t length = sizeof error;
    ::getsockopt(socket.number(), SOL_SOCKET, SO_ERROR, &error, &length);
  }
  if (error == 0) return socket;
  why = std::strerror(error);
  return {};
}

std::string new_token() {
  std::random_device random;
  std::string token;
  for (int i = 0; i < 4; ++i) token += fmt::format("{:08x}", random());
  return token;
}

std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find(' ', at), text.size());
    words.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return words;
}

// Of one attempt to connect, and of all of them.
constexpr double kAttemptSeconds = 3;
constexpr double kConnectSeconds = 30;

/// The side of rank 0, or the deputy: the connections of `expected`, in their order.
std::vector<Connection> accept_ranks(const Listener& listener, const std::string& token,
                                     const std::vector<int>& expected) {
  std::vector<Connection> of_rank(expected.size());
  std::vector<Connection> strangers;  // have not said who they are
  std::size_t missing = expected.size();
  const Clock::time_point start = Clock::now();
  while (missing > 0) {
    std::vector<pollfd> polls{{listener.socket.number(), POLLIN, 0}};
    for (const Connection& stranger : strangers) polls.push_back({stranger.number(), POLLIN, 0});
    ::poll(polls.data(), polls.size(), 100);
    if (seconds_since(start) > kConnectSeconds) {
      std::vector<int> absent;
      for (std::size_t i = 0; i < of_rank.size(); ++i) {
        if (!of_rank[i].is_open()) absent.push_back(expected[i]);
      }
      fail("{} did not connect to this one within {} s", name_ranks(absent), kConnectSeconds);
    }
    for (;;) {
      Descriptor socket(::accept4(listener.socket.number(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!socket) break;
      strangers.emplace_back(std::move(socket));
    }
    for (Connection& stranger : strangers) {
      int rank = -1;
      const bool open = stranger.receive([&](const Frame& frame) {
        const std::vector<std::string> words = words_of(frame.text);
        if (frame.kind != FrameKind::kHello || words.size() != 2 || words[0] != token) return;
        rank = static_cast<int>(std::strtol(words[1].c_str(), nullptr, 10));
      });
      const auto found = std::find(expected.begin(), expected.end(), rank);
      const auto place = static_cast<std::size_t>(found - expected.begin());
      if (found != expected.end() && !of_rank[place].is_open()) {
        stranger.send({FrameKind::kWelcome, 0, token});
        of_rank[place] = std::move(stranger);
        --missing;
      } else if (!open) {
        stranger.close();
      }
    }
    std::erase_if(strangers, [](const Connection& stranger) { return !stranger.is_open(); });
  }
  return of_rank;
}

/// Where a rank listens: `token` shows that it is the one.
struct Offer {
  std::string token;
  std::string port;
  std::vector<std::string> addresses;  // none where all ranks are near
};

std::string text_of(const Offer& offer) {
  return fmt::format("{} {} {}", offer.token, offer.port, fmt::join(offer.addresses, " "));
}

/// Empty where the rank did not come to listen.
Offer offer_from(const std::string& text) {
  const std::vector<std::string> words = words_of(text);
  if (words.size() < 2) return {};
  return {words[0], words[1], {words.begin() + 2, words.end()}};
}

/// Another rank's side: tries the addresses until one is the listener's.
Connection connect_to_rank(const Offer& offer, bool near, int listener, int rank,
                           const std::string& host) {
  const std::vector<std::string> addresses =
      near ? std::vector<std::string>{"127.0.0.1"} : offer.addresses;
  const Clock::time_point start = Clock::now();
  std::string tried;
  while (seconds_since(start) < kConnectSeconds) {
    tried.clear();
    for (const std::string& address : addresses) {
      std::string why = "somebody else answers there";
      Descriptor socket = connect_to(address, offer.port, kAttemptSeconds, why);
      if (socket) {
        Connection connection(std::move(socket));
        connection.send({FrameKind::kHello, 0, fmt::format("{} {}", offer.token, rank)});
        bool welcome = false;
        bool open = true;
        const Clock::time_point asked = Clock::now();
        while (open && !welcome && seconds_since(asked) < kAttemptSeconds) {
          wait_for(connection.number(), POLLIN, 0.1);
          open = connection.receive([&](const Frame& frame) {
            welcome = welcome || (frame.kind == FrameKind::kWelcome && frame.text == offer.token);
          });
        }
        if (welcome) return connection;
      }
      tried += fmt::format("{}{}: {}", tried.empty() ? "" : "; ", address, why);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  fail(
      "rank {} on {} cannot be reached at port {} ({}): let the machines of the run connect to each "
      "other by TCP",
      listener, host, offer.port, tried.empty() ? "it has no address" : tried);
}

/// Ranks that did not come to something, as a rank that waited for them says.
struct Lateness {
  std::vector<int> missing;  // none where it is not known
  std::string predicate;     // LateError
};

std::string text_of(const Lateness& late) {
  return fmt::format("{}|{}", fmt::join(late.missing, " "), late.predicate);
}

Lateness lateness_from(const std::string& text) {
  const std::size_t bar = std::min(text.find('|'), text.size());
  Lateness late;
  for (const std::string& word : words_of(text.substr(0, bar))) {
    late.missing.push_back(static_cast<int>(std::strtol(word.c_str(), nullptr, 10)));
  }
  late.predicate = text.substr(std::min(bar + 1, text.size()));
  return late;
}

/// One line to stderr, whole even where other threads or ranks print.
void print_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  text = "agoq: " + text + "\n";
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
}

}  // namespace

// --- the thread ---

class RankWatch::Thread {
 public:
  Thread(Communicator& group, const RankWatchOptions& options)
      : group_(group),
        rank_(group.rank()),
        size_(group.size()),
        options_(options),
        interval_(std::clamp(options.timeout_seconds / 10, 0.01, 1.0)),
        silence_(0.8 * options.timeout_seconds),
        places_(group.gather_values(place_of_this_process())),
        deputy_(deputy_of(places_)),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    connect(group);
    for (Peer& peer : peers_) peer.heard = Clock::now();
    // Signals are the main thread's.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { watch(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void set_activity(const char* activity) {
    const std::lock_guard lock(mutex_);
    std::strncpy(activity_.data(), activity, activity_.size() - 1);
  }

  void leave() {
    ask([](Request& request) { request.goodbye = true; });
    thread_.join();
  }

  [[noreturn]] void fail(const std::string& text, int status) {
    end_by({FrameKind::kFailed, status, text});
  }
  [[noreturn]] void fail_late(const LateError& error, int status) {
    end_by({FrameKind::kLate, status, text_of(Lateness{error.missing(), error.predicate()})});
  }
  [[noreturn]] void fail_together(const std::string& text, int status) {
    std::fflush(nullptr);
    if (rank_ == 0) ask([&](Request& request) { request.end = Frame{FrameKind::kEnd, status, text}; });
    for (;;) ::pause();
  }

 private:
  struct Peer {
    int rank = 0;
    Connection connection;
    Clock::time_point heard = {};
    std::string activity = "its start";
    std::uint64_t begun = 0;  // Communicator::begun()
    bool gone = false;        // has said goodbye
  };
  /// What the main thread wants of the thread.
  struct Request {
    bool goodbye = false;
    std::optional<Frame> failure;  // kFailed or kLate
    std::optional<Frame> end;
  };
  /// A failure of a rank that is to be reported, unless it turns out to be what a lost one has caused.
  struct Failure {
    Frame frame;
    int rank = 0;
    std::string activity;
    std::uint64_t begun = 0;  // operations that it has come to
    Clock::time_point since;
  };

  // --- connecting ---

  /// The rank that speaks for the others where rank 0 is lost: of another machine where there is one.
  static int deputy_of(const std::vector<Place>& places) {
    for (std::size_t r = 1; r < places.size(); ++r) {
      if (!are_near(places[r], places.front())) return static_cast<int>(r);
    }
    return 1;
  }
  static bool are_near(const Place& a, const Place& b) { return std::strcmp(a.network, b.network) == 0; }
  const Place& place_of(int rank) const { return places_[static_cast<std::size_t>(rank)]; }

  void connect(Communicator& group) {
    const bool near = std::all_of(places_.begin(), places_.end(),
                                  [&](const Place& place) { return are_near(place, places_.front()); });
    // Whatever fails on one rank is gathered, so that all ranks fail with it.
    std::string failure, offered;
    Listener listener;
    try {
      check(static_cast<bool>(wake_), "an eventfd could not be made: {}", reason());
      if (rank_ == 0 || rank_ == deputy_) {
        listener = listen_for_ranks(!near, size_);
        offered = text_of(Offer{new_token(), std::to_string(listener.port),
                                near ? std::vector<std::string>{} : addresses_of_this_machine()});
      }
    } catch (const Error& error) {
      failure = error.what();
    }
    const std::vector<std::string> offers = group.gather_texts(offered);
    const Offer of_first = offer_from(offers.front());
    const Offer of_deputy = offer_from(offers[static_cast<std::size_t>(deputy_)]);
    if (failure.empty() && !of_first.token.empty() && !of_deputy.token.empty()) {
      try {
        if (rank_ == 0) {
          accept(listener, of_first, ranks_from(1), peers_);
        } else {
          peers_.push_back({0, connect_to(0, of_first)});
          std::vector<int> followers = ranks_from(1);
          std::erase(followers, deputy_);
          if (rank_ == deputy_) {
            accept(listener, of_deputy, followers, followers_);
          } else {
            to_deputy_ = connect_to(deputy_, of_deputy);
          }
        }
      } catch (const Error& error) {
        failure = error.what();
      }
    }
    const std::vector<std::string> failures = group.gather_texts(failure);
    // What a rank says that could not connect tells more than that another has waited for it.
    for (int r = size_ - 1; r >= 0; --r) {
      const std::string& text = failures[static_cast<std::size_t>(r)];
      if (text.empty()) continue;
      const std::string line = fmt::format("the ranks cannot be watched: {}: {}", name_of(r), text);
      throw AgreedError(ErrorKind::kFailure, rank_ == 0 ? line : "");
    }
  }
  std::vector<int> ranks_from(int first) const {
    std::vector<int> ranks;
    for (int r = first; r < size_; ++r) ranks.push_back(r);
    return ranks;
  }
  Connection connect_to(int rank, const Offer& offer) const {
    return connect_to_rank(offer, are_near(place_of(rank_), place_of(rank)), rank, rank_,
                           place_of(rank).host);
  }
  static void accept(const Listener& listener, const Offer& offer, const std::vector<int>& ranks,
                     std::vector<Peer>& peers) {
    std::vector<Connection> connections = accept_ranks(listener, offer.token, ranks);
    for (std::size_t i = 0; i < ranks.size(); ++i)
      peers.push_back({ranks[i], std::move(connections[i])});
  }

  // --- what the main thread asks for ---

  template <typename Change>
  void ask(Change change) {
    {
      const std::lock_guard lock(mutex_);
      change(request_);
    }
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_.number(), &one, sizeof one);
  }
  [[noreturn]] void end_by(const Frame& failure) {
    std::fflush(nullptr);  // _exit will not
    ask([&](Request& request) { request.failure = failure; });
    // The thread ends the process.
    for (;;) ::pause();
  }

  std::string name_of(int rank) const {
    return fmt::format("rank {} of {} (host {}, pid {})", rank, size_, place_of(rank).host,
                       place_of(rank).pid);
  }

  std::string own_activity() {
    const std::lock_guard lock(mutex_);
    return activity_.data();
  }

  std::string activity_of(int rank) {
    for (const Peer& peer : peers_) {
      if (peer.rank == rank) return peer.activity;
    }
    return own_activity();
  }

  // --- the loop ---

  void watch() {
    Clock::time_point sent{};
    Clock::time_point turn = Clock::now();
    for (;;) {
      std::vector<pollfd> polls{{wake_.number(), POLLIN, 0}};
      for (const Peer& peer : peers_) {
        polls.push_back({peer.connection.number(), POLLIN, 0});  // a closed one's -1 is passed over
      }
      double wait = interval_ - seconds_since(sent);
      if (failure_) wait = std::min(wait, kGraceSeconds / 10);
      if (wait > 0) ::poll(polls.data(), polls.size(), static_cast<int>(wait * 1e3) + 1);
      std::uint64_t ignored = 0;
      [[maybe_unused]] const ssize_t count = ::read(wake_.number(), &ignored, sizeof ignored);

      // After a halt of this process, or of all of them, nobody's silence means anything.
      const bool halted = seconds_since(turn) > silence_ / 2;
      turn = Clock::now();
      if (halted) {
        for (Peer& peer : peers_) peer.heard = turn;
      }
      hear();
      for (const Peer& peer : peers_) {
        if (!peer.gone && seconds_since(peer.heard) > silence_) end_silent(peer);
      }
      if (carry_out_request()) return;
      if (seconds_since(sent) >= interval_) {
        sent = Clock::now();
        const std::string alive = fmt::format("{} {}", group_.begun(), own_activity());
        for (Peer& peer : peers_) {
          if (peer.gone || !peer.connection.is_open()) continue;
          peer.connection.flush();
          // A peer that takes nothing finds the newest when it does.
          if (!peer.connection.has_unsent()) {
            peer.connection.send({FrameKind::kAlive, 0, alive});
          }
        }
      }
    }
  }

  /// Takes what all peers have sent, and ends the process if that was its end. Only then what is closed:
  /// a process that has been stopped itself finds that the others have ended without it, and which of
  /// them has told it so does not matter.
  void hear() {
    std::vector<Peer*> closed;
    for (Peer& peer : peers_) {
      if (peer.connection.is_open() &&
          !peer.connection.receive([&](const Frame& f) { take(peer, f); })) {
        closed.push_back(&peer);
      }
    }
    for (Peer* peer : closed) {
      peer->connection.close();
      if (!peer->gone) end_lost(*peer, "is gone: its connection closed without a goodbye");
    }
  }

  void take(Peer& peer, const Frame& frame) {
    peer.heard = Clock::now();
    switch (frame.kind) {
      case FrameKind::kAlive: {
        const std::size_t space = std::min(frame.text.find(' '), frame.text.size());
        peer.begun = std::strtoull(frame.text.c_str(), nullptr, 10);
        peer.activity = frame.text.substr(std::min(space + 1, frame.text.size()));
        break;
      }
      case FrameKind::kGoodbye:
        peer.gone = true;
        if (rank_ == 0) peer.connection.send({FrameKind::kGoodbye, 0, ""});
        break;
      case FrameKind::kFailed:
      case FrameKind::kLate: add_failure({frame, peer.rank, peer.activity, peer.begun, {}}); break;
      case FrameKind::kEnd: ::_exit(frame.status);
      default: break;
    }
  }

  /// What a rank says of itself tells more than that others waited for it.
  void add_failure(Failure failure) {
    const bool tells_more =
        failure_ && failure_->frame.kind == FrameKind::kLate && failure.frame.kind == FrameKind::kFailed;
    failure.since = Clock::now();
    if (!failure_ || tells_more) failure_ = std::move(failure);
  }

  /// Whether the thread has nothing left to do.
  bool carry_out_request() {
    Request request;
    {
      const std::lock_guard lock(mutex_);
      request = request_;
    }
    if (request.end) end(request.end->text, request.end->status);
    if (request.failure && !own_failure_is_told_) {
      own_failure_is_told_ = true;
      add_failure({*request.failure, rank_, own_activity(), group_.begun(), {}});
      if (rank_ != 0) peers_.front().connection.send(*request.failure);
    }
    if (failure_) end_failed();
    if (!request.goodbye) return false;
    if (rank_ == 0) {
      return std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.gone; });
    }
    Peer& first = peers_.front();
    if (!said_goodbye_) first.connection.send({FrameKind::kGoodbye, 0, ""});
    said_goodbye_ = true;
    // Its answer: were the connection closed before, what has not been read of it would be lost.
    return first.gone;
  }

  // --- the end ---

  /// Ends all ranks with the failure, when it has stood for long enough to know that it is the first
  /// cause: a rank that is lost fails its neighbours as well.
  void end_failed() {
    if (rank_ != 0) {
      // Rank 0 answers, or is lost; where it lives and does neither, this rank says what has happened.
      if (seconds_since(failure_->since) > kAnswerSeconds && !is_silent(peers_.front())) {
        print_line(line_of(*failure_));
        ::_exit(failure_->frame.status);
      }
      return;
    }
    if (seconds_since(failure_->since) < kGraceSeconds) return;
    if (failure_->frame.kind == FrameKind::kLate) {
      for (const Peer& peer : peers_) {
        if (!peer.gone && is_silent(peer)) end_silent(peer);
      }
    }
    end(line_of(*failure_), failure_->frame.status);
  }

  /// Whether signs of life of `peer` have failed to come, be it for less long than they may.
  bool is_silent(const Peer& peer) const { return seconds_since(peer.heard) > 3 * interval_; }

  std::string line_of(const Failure& failure) {
    if (failure.frame.kind == FrameKind::kFailed) {
      return fmt::format("{}, in {}: {}", name_of(failure.rank), failure.activity, failure.frame.text);
    }
    Lateness late = lateness_from(failure.frame.text);
    if (late.missing.empty()) late.missing = ranks_behind(failure);
    std::string names;
    for (std::size_t i = 0; i < std::min(late.missing.size(), kMostNamed); ++i) {
      names += fmt::format("{}{}, in {}", names.empty() ? "" : "; ", name_of(late.missing[i]),
                           activity_of(late.missing[i]));
    }
    if (late.missing.size() > kMostNamed)
      names += fmt::format("; and {} more", late.missing.size() - kMostNamed);
    if (names.empty()) names = fmt::format("one or more of {} ranks", size_);
    return fmt::format(
        "{}, {}: {} waited for it in {}; all ranks end: {}, and raise {} if a rank is only "
        "slow",
        names, late.predicate, name_ranks({failure.rank}), failure.activity, options_.advice,
        options_.setting);
  }

  /// Where the transport does not know which ranks did not come to what `failure` waited for: those that
  /// have come to fewer exchanges, or else those that do something else. Rank 0's view.
  std::vector<int> ranks_behind(const Failure& failure) {
    std::vector<int> behind, elsewhere;
    const auto add = [&](int rank, std::uint64_t begun, const std::string& activity) {
      if (begun < failure.begun) behind.push_back(rank);
      if (activity != failure.activity) elsewhere.push_back(rank);
    };
    if (rank_ == 0) add(0, group_.begun(), own_activity());
    for (const Peer& peer : peers_) add(peer.rank, peer.begun, peer.activity);
    return behind.empty() ? elsewhere : behind;
  }

  [[noreturn]] void end_silent(const Peer& peer) {
    end_lost(peer, fmt::format("has given no sign of life for {:.1f} s (stopped, or its machine or "
                               "network is down)",
                               seconds_since(peer.heard)));
  }

  [[noreturn]] void end_lost(const Peer& peer, const std::string& what) {
    // Where rank 0 is lost every rank notices: the deputy speaks for all.
    if (rank_ != 0 && rank_ != deputy_) await_deputy();
    // Where the deputy itself was stopped, another has spoken in its place.
    for (Peer& follower : followers_) {
      if (!follower.connection.is_open()) continue;
      follower.connection.receive([](const Frame& frame) {
        if (frame.kind == FrameKind::kEnd) ::_exit(frame.status);
      });
    }
    end(fmt::format("{} {}, last in {}; all ranks end: {}", name_of(peer.rank), what, peer.activity,
                    options_.advice),
        1);
  }

  /// Returns where the deputy is lost as well: then the others, who have no connection with each other,
  /// take turns, and the launcher ends those that have not had theirs.
  void await_deputy() {
    const Clock::time_point start = Clock::now();
    // It may notice one sign of life later.
    while (to_deputy_.is_open() && seconds_since(start) < 2 * interval_ + kGraceSeconds) {
      wait_for(to_deputy_.number(), POLLIN, 0.05);
      const bool open = to_deputy_.receive([](const Frame& frame) {
        if (frame.kind == FrameKind::kEnd) ::_exit(frame.status);
      });
      if (!open) to_deputy_.close();
    }
    // mpirun begins with SIGCONT when a rank has spoken and ended, and may kill long after.
    std::signal(SIGCONT, [](int) { ::_exit(1); });
    std::signal(SIGTERM, SIG_DFL);
    std::this_thread::sleep_for(Seconds(turn_seconds(ranks_before())));
  }

  /// How many ranks have their turn before this one: those of other machines than the two lost ones'
  /// come first.
  int ranks_before() const {
    const auto order = [&](int rank) {
      const Place& place = place_of(rank);
      return std::pair(are_near(place, place_of(0)) || are_near(place, place_of(deputy_)), rank);
    };
    int before = 0;
    for (const int rank : ranks_from(1)) {
      if (rank != deputy_ && order(rank) < order(rank_)) ++before;
    }
    return before;
  }

  [[noreturn]] void end(const std::string& line, int status) {
    print_line(line);
    // The lost one too, which may only have been stopped: it would take the others for lost.
    std::vector<Peer*> told;
    for (std::vector<Peer>* peers : {&peers_, &followers_}) {
      for (Peer& peer : *peers) {
        if (!peer.gone && peer.connection.is_open()) told.push_back(&peer);
      }
    }
    for (Peer* peer : told) peer->connection.send({FrameKind::kEnd, status, ""});
    if (to_deputy_.is_open()) to_deputy_.send({FrameKind::kEnd, status, ""});
    // What is on its way is lost where this process ends with something unread: the others close first.
    const Clock::time_point start = Clock::now();
    while (seconds_since(start) < kAnswerSeconds / 2) {
      bool waiting = false;
      for (Peer* peer : told) {
        if (!peer->connection.is_open()) continue;
        peer->connection.flush();
        if (!peer->connection.receive([](const Frame&) {})) peer->connection.close();
        waiting = waiting || (peer->connection.is_open() && !is_silent(*peer));
      }
      if (!waiting) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    ::_exit(status);
  }

  // What rank 0 takes to answer at most.
  static constexpr double kAnswerSeconds = 2;
  // In which the loss of a rank shows that has made another fail.
  static constexpr double kGraceSeconds = 0.3;
  static constexpr std::size_t kMostNamed = 3;

  const Communicator& group_;
  int rank_;
  int size_;
  RankWatchOptions options_;
  double interval_;  // seconds between signs of life
  double silence_;   // seconds without one after which a rank is lost
  std::vector<Place> places_;
  int deputy_;
  Descriptor wake_;
  std::vector<Peer> peers_;      // of rank 0: all others; of the others: rank 0
  std::vector<Peer> followers_;  // of the deputy: all but rank 0, who hear of its end from it
  Connection to_deputy_;         // of these
  std::optional<Failure> failure_;
  bool own_failure_is_told_ = false;
  bool said_goodbye_ = false;

  std::mutex mutex_;  // of the two below
  std::array<char, kLongestActivity + 1> activity_{"its start"};
  Request request_;

  std::thread thread_;
};

RankWatch::RankWatch(Communicator& group, const RankWatchOptions& options)
    : exceptions_(std::uncaught_exceptions()) {
  check_input(kShortestTimeout <= options.timeout_seconds && options.timeout_seconds <= kLongestTimeout,
              "{} must be from {:g} to {:.0f} s: ranks give a sign of life ten times in it; it is {}",
              options.setting, kShortestTimeout, kLongestTimeout, options.timeout_seconds);
  if (group.size() > 1) thread_ = std::make_unique<Thread>(group, options);
}

RankWatch::~RankWatch() {
  if (thread_ == nullptr) return;
  if (std::uncaught_exceptions() > exceptions_) thread_->fail("it ended by an error", 1);
  thread_->leave();
}

void RankWatch::run(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    if (thread_ == nullptr) throw;
    const int status = error.kind() == ErrorKind::kInput ? 2 : 1;
    if (const auto* late = dynamic_cast<const LateError*>(&error)) thread_->fail_late(*late, status);
    // What is not finite is so on all ranks: they count together.
    if (dynamic_cast<const AgreedError*>(&error) != nullptr || error.kind() == ErrorKind::kNotFinite) {
      thread_->fail_together(error.what(), status);
    }
    thread_->fail(error.what(), status);
  } catch (const std::exception& error) {
    if (thread_ != nullptr) thread_->fail(error.what(), 1);
    throw;
  }
}

void RankWatch::set_activity(const char* activity) { thread_->set_activity(activity); }

}  // namespace agoq
