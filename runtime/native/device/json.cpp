#include "json.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>

#include "../fault.h"

class JsonReader {
  public:
    JsonReader(const std::string& path, const std::string& text) : path_(path), text_(text) {}

    Json whole() {
        Json out = value(0);
        blank();
        if (at_ != text_.size()) bad("goes on behind its end");
        return out;
    }

  private:
    enum { DEEPEST = 32 };
    const std::string& path_;
    const std::string& text_;
    size_t at_ = 0;

    [[noreturn]] void bad(const char* what) const {
        fail(DI_BAD_KERNELS, "%s: the table of kernels %s at byte %zu", path_.c_str(), what, at_);
    }

    void blank() {
        while (at_ < text_.size() && std::strchr(" \n\r\t", text_[at_])) ++at_;
    }

    bool take(char c) {
        blank();
        if (at_ >= text_.size() || text_[at_] != c) return false;
        ++at_;
        return true;
    }

    void need(char c) {
        if (!take(c)) bad("is not what was written");
    }

    std::string string() {
        need('"');
        std::string out;
        for (; at_ < text_.size() && text_[at_] != '"'; ++at_) {
            if (text_[at_] == '\\') ++at_;
            if (at_ < text_.size()) out += text_[at_];
        }
        need('"');
        return out;
    }

    Json value(int depth) {
        if (depth > DEEPEST) bad("is nested too deep");
        Json out;
        blank();
        if (at_ >= text_.size()) bad("ends early");
        const char c = text_[at_];
        if (c == '{') {
            out.kind_ = Json::OBJECT;
            for (need('{'); !take('}');) {
                if (!out.fields_.empty()) need(',');
                std::string key = string();
                need(':');
                out.fields_.emplace_back(key, value(depth + 1));
            }
        } else if (c == '[') {
            out.kind_ = Json::ARRAY;
            for (need('['); !take(']');) {
                if (!out.items_.empty()) need(',');
                out.items_.push_back(value(depth + 1));
            }
        } else if (c == '"') {
            out.kind_ = Json::TEXT;
            out.text_ = string();
        } else if (const size_t word = constant()) {
            at_ += word;
        } else {
            number(out);
        }
        return out;
    }

    size_t constant() const {
        for (const char* word : {"true", "false", "null"}) {
            if (!text_.compare(at_, std::strlen(word), word)) return std::strlen(word);
        }
        return 0;
    }

    // Fractions occur in what nobody here reads; their whole part stays.
    void number(Json& out) {
        const char* const begin = text_.c_str() + at_;
        char* end = nullptr;
        errno = 0;
        out.kind_ = Json::INTEGER;
        out.integer_ = std::strtoll(begin, &end, 10);
        if (errno || end == begin) bad("has no number");
        if (*end == '.' || *end == 'e' || *end == 'E') std::strtod(begin, &end);
        at_ += (size_t)(end - begin);
    }
};

Json Json::read(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    if (!in) fail(DI_BAD_KERNELS, "%s: the table of kernels cannot be read: %s", path.c_str(), std::strerror(errno));
    const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    return JsonReader(path, text).whole();
}

void Json::require(Kind kind) const {
    if (kind_ != kind) fail(DI_BAD_KERNELS, "the table of kernels has a value of another kind than is due");
}

const Json& Json::at(const char* key) const {
    require(OBJECT);
    for (const auto& f : fields_) {
        if (f.first == key) return f.second;
    }
    fail(DI_BAD_KERNELS, "the table of kernels lacks '%s'", key);
}

int64_t Json::at_or(const char* key, int64_t other) const {
    require(OBJECT);
    for (const auto& f : fields_) {
        if (f.first == key) return f.second.integer();
    }
    return other;
}

std::string Json::text_or(const char* key, const char* other) const {
    require(OBJECT);
    for (const auto& f : fields_) {
        if (f.first == key) return f.second.text();
    }
    return other;
}

const std::vector<Json>& Json::items() const {
    require(ARRAY);
    return items_;
}

const std::vector<std::pair<std::string, Json>>& Json::fields() const {
    require(OBJECT);
    return fields_;
}

const std::string& Json::text() const {
    require(TEXT);
    return text_;
}

int64_t Json::integer() const {
    require(INTEGER);
    return integer_;
}
