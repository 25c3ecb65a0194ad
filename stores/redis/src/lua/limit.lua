-- Decides about requests for the buckets of rate limits, one after the other at one instant. KEYS: the buckets of all requests; ARGV: 'take', 'peek',
-- 'reset' or 'refund', then for each request one text of numbers: how long a take may wait, and for each of its buckets what the tokens cost, how
-- long an empty bucket needs to become full, and for a refund the instant that the take returned.
-- Returns one text for each request: 1 or 0, whether it is allowed, the server's clock, and for each bucket the instant at which it is full; or '-' and
-- an error, if the key of a bucket cannot be read. Then the request has changed nothing, and the others are decided as if it were not there.
-- Times are nanoseconds in decimal digits. A Lua number is exact up to 2^53, so the script computes with pairs: seconds, and nanoseconds below them.
-- `core::limit` has the same arithmetic, and says why.
local E9 = 1000000000
local DIGITS = '%.0f%09.0f'
local function parse(text)
  if #text <= 9 then return 0, tonumber(text) end
  return tonumber(string.sub(text, 1, -10)), tonumber(string.sub(text, -9))
end
local function plus(s, n, s2, n2)
  s, n = s + s2, n + n2
  if n >= E9 then return s + 1, n - E9 end
  return s, n
end
local function minus(s, n, s2, n2)
  s, n = s - s2, n - n2
  if n < 0 then return s - 1, n + E9 end
  return s, n
end
local function later(s, n, s2, n2)
  return s > s2 or (s == s2 and n > n2)
end
local operation = ARGV[1]
local takes = operation == 'take' or operation == 'peek'
local time = redis.call('TIME')
local now_s, now_n = tonumber(time[1]), tonumber(time[2]) * 1000
local now = ' ' .. string.format(DIGITS, now_s, now_n)

-- The instants at which the buckets are full, by key, as the requests so far have left them; and why a key cannot be read.
local full_s, full_n, failed = {}, {}, {}
local function read(key)
  local found = redis.pcall('GET', key)
  local s, n = now_s, now_n
  if type(found) == 'table' then
    failed[key] = '-' .. found.err
  elseif found then
    local found_s, found_n = parse(found)
    if not found_s or not found_n then
      failed[key] = '-WRONGTYPE the key of a bucket has another value'
    elseif later(found_s, found_n, s, n) then
      s, n = found_s, found_n
    end
  end
  full_s[key], full_n[key] = s, n
end

-- The numbers of a request. Most requests of one script have the same, so they are parsed once.
local numbers, count
local term_s, term_n = {}, {}
local until_s, until_n
local function read_numbers(text)
  numbers, count = text, 0
  for number in string.gmatch(text, '%d+') do
    count = count + 1
    term_s[count], term_n[count] = parse(number)
  end
  until_s, until_n = plus(now_s, now_n, term_s[1], term_n[1])
  count = (count - 1) / 3
end

local replies, changed, is_changed = {}, {}, {}
local after_s, after_n = {}, {}
local first = 0
for request = 1, #ARGV - 1 do
  if ARGV[request + 1] ~= numbers then read_numbers(ARGV[request + 1]) end
  local allowed, failure = true, nil
  for i = 1, count do
    local key, term = KEYS[first + i], 3 * i - 1
    if not full_s[key] then read(key) end
    failure = failure or failed[key]
    local s, n = full_s[key], full_n[key]
    if takes then
      s, n = plus(s, n, term_s[term], term_n[term])
      local usable_s, usable_n = minus(s, n, term_s[term + 1], term_n[term + 1])
      if later(usable_s, usable_n, until_s, until_n) then allowed = false end
    elseif operation == 'reset' then
      s, n = now_s, now_n
    else
      -- A refund: only the last take comes back.
      if term_s[term + 2] == s and term_n[term + 2] == n then s, n = minus(s, n, term_s[term], term_n[term]) end
      if later(now_s, now_n, s, n) then s, n = now_s, now_n end
    end
    after_s[i], after_n[i] = s, n
  end
  if failure then
    replies[request] = failure
  else
    local reply = (allowed and '1' or '0') .. now
    for i = 1, count do
      local key = KEYS[first + i]
      if allowed and operation ~= 'peek' then
        full_s[key], full_n[key] = after_s[i], after_n[i]
        if not is_changed[key] then
          is_changed[key] = true
          changed[#changed + 1] = key
        end
      end
      reply = reply .. ' ' .. string.format(DIGITS, full_s[key], full_n[key])
    end
    replies[request] = reply
  end
  first = first + count
end

-- Each bucket is written once, however many requests took from it.
for i = 1, #changed do
  local key = changed[i]
  local s, n = full_s[key], full_n[key]
  if later(s, n, now_s, now_n) then
    -- The key ends when the bucket is full: then nothing is left.
    local left_s, left_n = minus(s, n, now_s, now_n)
    local left = string.format('%.0f', left_s * 1000 + math.ceil(left_n / 1000000))
    local set = redis.pcall('SET', key, string.format(DIGITS, s, n), 'PX', left)
    if set.err then
      -- The first write of the script was refused: nothing was written.
      error({ err = (i == 1 and 'REFUSED ' or '') .. set.err })
    end
  else
    redis.call('DEL', key)
  end
end
return replies
