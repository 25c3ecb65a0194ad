-- Stores a value and its fence, unless the server has a newer fence for the key. KEYS: value, fence; ARGV: the fence in sixteen
-- digits, the ttl of the value in ms, the ttl of the fence in ms, the value. Returns the newer fence, or an empty string.
local seen = redis.call('GET', KEYS[2])
if seen and seen > ARGV[1] then return seen end
redis.call('SET', KEYS[1], ARGV[4], 'PX', ARGV[2])
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[3])
return ''
