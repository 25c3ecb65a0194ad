local answers, at = {}, 4
for i = 4, #ARGV, 2 do
  local attempt, count = ARGV[i], tonumber(ARGV[i + 1])
  local good = true
  for k = at, at + count - 1 do good = good and find(load(KEYS[k]), attempt) ~= nil end
  for k = at, at + count - 1 do
    if good then renew(load(KEYS[k]), find(load(KEYS[k]), attempt), client) end
  end
  at = at + count
  answers[#answers + 1] = good and 1 or 0
end
flush()
return answers
