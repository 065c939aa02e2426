// JSON as kernels.json has it: objects, arrays, strings without escapes beyond \" and \\, numbers that are integers.
#ifndef DEEPINFER_DEVICE_JSON_H
#define DEEPINFER_DEVICE_JSON_H
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

class Json {
  public:
    // Faults with DI_BAD_KERNELS, naming the file and the place.
    static Json read(const std::string& path);

    const Json& at(const char* key) const;           // of an object; faults without it
    int64_t at_or(const char* key, int64_t other) const;
    std::string text_or(const char* key, const char* other) const;
    const std::vector<Json>& items() const;          // of an array
    const std::vector<std::pair<std::string, Json>>& fields() const;
    const std::string& text() const;
    int64_t integer() const;
    bool is_text() const { return kind_ == TEXT; }

  private:
    enum Kind { NOTHING, INTEGER, TEXT, ARRAY, OBJECT };
    Kind kind_ = NOTHING;
    int64_t integer_ = 0;
    std::string text_;
    std::vector<Json> items_;
    std::vector<std::pair<std::string, Json>> fields_;

    void require(Kind kind) const;
    friend class JsonReader;
};

#endif
